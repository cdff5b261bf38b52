"""What a compiled kernel takes and does, read from its cubin and its PTX."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import attrs

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (0x[0-9a-f]+|\d+)[,;]")
_BULK_COPY = re.compile(r"\bcp\.async\.bulk\.(?!commit|wait)")
_MMA_KINDS = {"wgmma.mma_async": "wgmma", "mma.sync": "mma.sync", "tcgen05.mma": "tcgen05"}


@attrs.frozen
class ResourceUsage:
    """What the assembler gave a kernel."""

    registers: int
    """32-bit registers per thread."""
    stack_bytes: int
    """Local memory per thread: registers that did not fit, as our kernels have no arrays and no calls."""


def read_usage(cubin: bytes) -> ResourceUsage:
    """Run the ``cuobjdump`` of the Triton wheel over one kernel.

    Raises:
        RuntimeError: the tool is missing or prints something else.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_cuobjdump()), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=False)
    usages = _USAGE.findall(printed.stdout)
    if not usages:
        raise RuntimeError(
            f"cuobjdump: wanted the resource usage of a kernel, got {printed.stdout + printed.stderr!r}; "
            "reinstall Triton"
        )
    _, registers, stack, _, local = max(usages, key=lambda usage: int(usage[1]))
    return ResourceUsage(int(registers), max(int(stack), int(local)))


def find_cuobjdump() -> Path:
    """The tool inside the Triton wheel.

    Raises:
        RuntimeError: Triton is not installed, or is a build without it.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("the static report needs Triton; pip install triton")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise RuntimeError(f"cuobjdump: wanted it at {path}; install a Triton wheel from PyPI")
    return path


def list_mma_kinds(ptx: str) -> tuple[str, ...]:
    """Matrix instructions in use: of ``wgmma``, ``mma.sync`` and ``tcgen05``."""
    return tuple(kind for instruction, kind in _MMA_KINDS.items() if instruction in ptx)


def count_loads(ptx: str) -> dict[str, int]:
    """Load and copy instructions from global memory, by bits per thread; ``tma`` for bulk copies."""
    widths: Counter[str] = Counter()
    for vector, bits in _LOAD.findall(ptx):
        widths[str(int(vector or 1) * int(bits))] += 1
    for num_bytes in _ASYNC_COPY.findall(ptx):
        widths[str(8 * int(num_bytes, 0))] += 1
    if bulk := len(_BULK_COPY.findall(ptx)):
        widths["tma"] = bulk
    return dict(sorted(widths.items(), key=lambda item: (len(item[0]), item[0]), reverse=True))
