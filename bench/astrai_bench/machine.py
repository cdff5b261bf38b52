"""The machine a bench runs on: its memory, its caches and its versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import attrs
import torch

_PACKAGES = ("astrai-triton", "torch", "triton", "flash-attn", "flashinfer-python")
_DEFAULT_CACHE = 32 << 20


@attrs.frozen(kw_only=True)
class Machine:
    """What a result is worth depends on this."""

    name: str
    """Of the GPU, or of the CPU."""
    kind: str
    """``cuda`` or ``cpu``."""
    system: str
    threads: int
    """Threads torch computes with on a CPU."""
    cache_bytes: int
    """The last cache before memory: L2 of a GPU, the last level of a CPU."""
    versions: dict[str, str]
    """Of Python, CUDA and every package that takes part."""


def describe_machine(device: torch.device) -> Machine:
    """The machine around ``device``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, sm_{properties.major}{properties.minor}"
        cache_bytes = int(properties.L2_cache_size)
    else:
        name, cache_bytes = _find_cpu(), find_cpu_cache()
    return Machine(
        name=name,
        kind=device.type,
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        threads=torch.get_num_threads(),
        cache_bytes=cache_bytes,
        versions=_find_versions(),
    )


def find_cpu_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache; 32 MiB where Linux does not tell."""
    sizes = []
    for path in root.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            sizes.append(int(number) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit, 1))
    return max(sizes, default=_DEFAULT_CACHE)


def find_free_bytes(device: torch.device) -> int:
    """Memory that can still be taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _find_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _find_cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
