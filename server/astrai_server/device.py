"""The machine at hand: which device and number type to run on, and how much memory is free."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import torch

from astrai_server.config import ConfigError, ServerSettings
from astrai_server.cpu import prefers_bfloat16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# bfloat16 rounds harder, so it has to be clearly faster to be chosen.
_WORTHWHILE_SPEEDUP = 1.25
_TIMED_TYPES = (torch.float32, torch.bfloat16)
_TIMED_ROWS = (1, 64)
_TIMED_ROUNDS = 8


@attrs.frozen
class Placement:
    """Where a model runs and in which type."""

    device: torch.device
    dtype: torch.dtype
    reason: str
    """Why this type, for people; empty if it was asked for."""

    @property
    def dtype_name(self) -> str:
        """As in the configuration, e.g. ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")


def place_model(server: ServerSettings) -> Placement:
    """Choose device and type, and set torch's number of CPU threads.

    ``dtype: auto`` on a CPU is bfloat16 where the CPU kernels multiply it in hardware; elsewhere it times
    both types on torch's matrix products of a small model (about 0.1 s).

    Raises:
        ConfigError: the device is not there.
    """
    if server.threads is not None:
        torch.set_num_threads(server.threads)
    device = _find_device(server.device)
    if server.dtype != "auto":
        return Placement(device, _DTYPES[server.dtype], "")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Placement(device, torch.bfloat16, "")
        return Placement(device, torch.float16, "this GPU has no bfloat16")
    if prefers_bfloat16(server):
        return Placement(device, torch.bfloat16, "")
    speedup = measure_bfloat16_speedup()
    dtype = torch.bfloat16 if speedup >= _WORTHWHILE_SPEEDUP else torch.float32
    return Placement(device, dtype, f"bfloat16 runs at {speedup:.1f} x the speed of float32 on this CPU")


def measure_bfloat16_speedup() -> float:
    """Time of float32 matrix products over that of bfloat16 ones on one core, decode and prefill shapes."""
    threads = torch.get_num_threads()
    # On one thread: other load on the machine then disturbs less, and the ratio is the same.
    torch.set_num_threads(1)
    try:
        times = {dtype: {rows: float("inf") for rows in _TIMED_ROWS} for dtype in _TIMED_TYPES}
        # In turns, so that a busy moment does not hit one type alone.
        for _ in range(_TIMED_ROUNDS):
            for dtype, best in times.items():
                for rows in _TIMED_ROWS:
                    best[rows] = min(best[rows], _time_linear(rows, dtype))
    finally:
        torch.set_num_threads(threads)
    float32, bfloat16 = (sum(times[dtype].values()) for dtype in _TIMED_TYPES)
    return float32 / bfloat16


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on a device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [amount for amount in (read_meminfo(), read_cgroup()) if amount is not None]
    return min(known, default=None)


def _find_device(wanted: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return torch.device("cuda:0" if count else "cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    idx = int(wanted.partition(":")[2] or 0)
    if idx >= count:
        seen = f"{count} of them" if count else "none"
        raise ConfigError(
            f"server.device: wanted a GPU that torch {torch.__version__} can use, got {wanted!r} "
            f"and torch sees {seen}; use cpu or auto"
        )
    return torch.device("cuda", idx)


def _time_linear(rows: int, dtype: torch.dtype) -> float:
    """Seconds of products with a few weights that do not all stay in the first caches."""
    weights = [torch.ones(1536, 576, dtype=dtype) for _ in range(4)]
    x = torch.ones(rows, 576, dtype=dtype)
    started = time.perf_counter()
    for weight in weights:
        torch.nn.functional.linear(x, weight)
    return time.perf_counter() - started


def read_meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes the kernel could give to a new process, or None where it does not tell."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def read_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes a container's limit leaves, file pages counted as free; None without a (version 2) limit."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0)))
