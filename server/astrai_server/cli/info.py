"""``astrai info``: what is installed here, and what this machine can do."""

from __future__ import annotations

import platform
import sys

import click

from astrai_server.cli.failure import debug_flag

# SmolLM2-135M in bfloat16 on two cores with AMX, steps of 1 and 16 requests and prefill (2026-11-30).
_PRELOADING = (
    "LD_PRELOAD of tcmalloc and Intel OpenMP: nothing for the CPU kernels, up to 10 % where torch computes"
)


@click.command(short_help="Show versions, hardware and attention backends.")
@debug_flag
def info() -> None:
    """Show versions, hardware and which attention backends are available."""
    import torch

    from astrai_server.capacity import MIB
    from astrai_server.cpu import describe_kernels
    from astrai_server.device import free_bytes
    from astrai_server.libraries import find_allocator, find_openmp
    from astrai_triton.backend import backend_reasons
    from astrai_triton.checkpoint.resolve import home

    for package in ("astrai-triton", "torch", "triton", "tokenizers", "llguidance", "aiohttp"):
        _show(package, find_version(package))
    _show("Python", f"{platform.python_version()} ({sys.executable})")
    _show("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    _show(
        "CPU", f"{_find_cpu()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    _show("CPU kernels", describe_kernels())
    _show("OpenMP", find_openmp())
    _show("allocator", f"{find_allocator()} ({_PRELOADING})")
    memory = free_bytes(torch.device("cpu"))
    _show("free memory", "unknown" if memory is None else f"{memory / MIB:.0f} MiB")
    _show("GPU", _describe_gpus())
    _show("cache", str(home()))
    click.echo("\nattention backends")
    for name, reason in backend_reasons().items():
        _show(f"  {name}", "available" if reason is None else f"not available: {reason}")


def _show(name: str, text: str) -> None:
    click.echo(f"{name:<15} {text}")


def find_version(package: str) -> str:
    """Version of an installed distribution, or "not installed"."""
    # Slow to import for a command that only shows its help.
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _find_cpu() -> str:
    """Model name of the first CPU, or the architecture where Linux does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _describe_gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        return f"none (torch is built for {built_for})"
    gpus = []
    for idx in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(idx)
        gpus.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}")
    return "; ".join(gpus)
