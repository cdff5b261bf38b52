"""Small KV pools, and tasks that come and go in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from astrai_triton.cache import Lease, PagePool

CHAIN = list(range(16))
"""A prompt of four pages."""


def make_pool(**sizes: Any) -> PagePool:
    """16 pages of 4 tokens, unless told otherwise."""
    defaults = {"max_batch_size": 8, "max_seq_len": 64, "max_step_tokens": 64, "page_size": 4, "n_tokens": 64}
    heads = {"n_layers": 1, "n_q_heads": 2, "n_kv_heads": 1, "head_dim": 2}
    return PagePool(**(heads | defaults | sizes))


def take(pool: PagePool, prompt: Sequence[int], salt: str | None = None) -> Lease:
    """Open a lease with slots for its whole prompt."""
    lease = pool.open(prompt, salt)
    assert lease is not None
    pool.extend(lease, len(prompt))
    return lease


def run(pool: PagePool, prompt: Sequence[int], salt: str | None = None) -> int:
    """Let a task come and go; returns how many tokens it found cached."""
    lease = take(pool, prompt, salt)
    pool.record(lease, prompt)
    pool.close(lease)
    pool.check()
    return lease.cached_len


def lookup(pool: PagePool, prefix: Sequence[int], salt: str | None = None) -> int:
    """How many tokens of ``prefix`` a longer prompt would find."""
    lease = pool.open([*prefix, 999], salt)
    assert lease is not None
    pool.close(lease)
    pool.check()
    return lease.cached_len
