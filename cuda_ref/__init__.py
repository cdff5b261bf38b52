"""The kernels of astrai_triton again, in CUDA C++ and independent of Triton, to check one against the other.

The same sources run on a CUDA device, compiled by nvcc, or on a CPU, compiled by g++, where every thread of a
block is a fibre under a runtime that checks each access. ``cuda_ref.ops`` has the functions.
"""

from __future__ import annotations

from cuda_ref.build import BuildError, build
from cuda_ref.toolchain import why_not

__all__ = ["BuildError", "build", "why_not"]
