"""Who owns which slot of the KV cache.

::

    PagePool                opens, extends, records and closes leases; binds one step
    ├── KVStorage           the K and V tensors
    ├── ReqToTokenPool      position -> slot, one row per running task
    ├── Allocator           free, owned and cached pages
    ├── RadixCache          which cached page continues which prefix
    └── Workspace           index tensors and scratch of one step, at fixed addresses
"""

from __future__ import annotations

from astrai_triton.cache.allocator import Allocator
from astrai_triton.cache.explain import PrefixReport, explain_prefix
from astrai_triton.cache.lease import Lease, PoolStats
from astrai_triton.cache.pool import PagePool
from astrai_triton.cache.radix import RadixCache, RadixNode
from astrai_triton.cache.storage import KVStorage, ReqToTokenPool
from astrai_triton.cache.workspace import Workspace

__all__ = [
    "Allocator",
    "KVStorage",
    "Lease",
    "PagePool",
    "PoolStats",
    "PrefixReport",
    "RadixCache",
    "RadixNode",
    "ReqToTokenPool",
    "Workspace",
    "explain_prefix",
]
