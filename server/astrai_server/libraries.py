"""Which allocator and which OpenMP this process has loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ALLOCATORS = {"tcmalloc": "tcmalloc", "jemalloc": "jemalloc", "mimalloc": "mimalloc"}
_OPENMPS = {"iomp5": "Intel OpenMP", "omp": "LLVM OpenMP", "gomp": "GNU OpenMP"}
_NAME = re.compile(r"lib([a-z0-9]+)[^/]*\.so[^/]*$")
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND")


def find_allocator(maps: Path = Path("/proc/self/maps")) -> str:
    """The allocator of ``malloc``: what was preloaded, or that of the C library."""
    return next((name for stem, name in _ALLOCATORS.items() if stem in _list_stems(maps)), "the C library's")


def find_openmp(maps: Path = Path("/proc/self/maps")) -> str:
    """The OpenMP that computes, with the variables that steer it.

    Where several are loaded, the first of the environment's choice counts: Intel's and LLVM's are preloaded
    to take the place of GNU's, which torch brings.
    """
    stems = _list_stems(maps)
    name = next((name for stem, name in _OPENMPS.items() if stem in stems), "no OpenMP")
    variables = [f"{variable}={os.environ[variable]}" for variable in _VARIABLES if variable in os.environ]
    return f"{name} ({', '.join(variables)})" if variables else name


def _list_stems(maps: Path) -> frozenset[str]:
    """Names of the mapped libraries up to the first character that is neither letter nor digit."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(found[1] for line in lines if (found := _NAME.search(line)))
