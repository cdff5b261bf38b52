"""What a build needs from the machine: compilers, ninja, headers, a device. Nothing here builds anything."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Literal

import torch

Kind = Literal["host", "cuda"]
"""Where the kernels run: on the CPU under the checking runtime, or on a CUDA device."""

KINDS: tuple[Kind, ...] = ("host", "cuda")

_MMA_CAPABILITY = (8, 0)


def why_not(kind: Kind) -> str | None:
    """Why ``kind`` cannot be built and run on this machine; None when it can. Builds nothing.

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``.
    """
    if kind == "cuda" and torch.version.cuda is not None and not torch.cuda.is_available():
        return "the CUDA build of cuda_ref needs a CUDA device, and there is none; pass CPU tensors"
    return why_not_build(kind)


def why_not_build(kind: Kind) -> str | None:
    """Why ``kind`` cannot be built on this machine, whether or not it could run; None when it can.

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: wanted 'host' or 'cuda', got {kind!r}; spell it so")
    if kind == "host" and platform.system() != "Linux":
        return f"the host build of cuda_ref needs Linux, this is {platform.system()}"
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a CUDA build of torch, or pass CPU tensors"
    if kind == "cuda" and find_nvcc() is None:
        return (
            "the CUDA build of cuda_ref needs nvcc; install the CUDA toolkit, or set CUDA_HOME to where it is"
        )
    if kind == "cuda" and not _capabilities():
        return "the CUDA build of cuda_ref needs to know for which GPU; set TORCH_CUDA_ARCH_LIST, such as 9.0"
    return _why_no_compiler()


def _why_no_compiler() -> str | None:
    program, *_ = find_compiler()
    if shutil.which(program) is None:
        return (
            f"cuda_ref is built by a C++17 compiler, and {program!r} is not in PATH; install g++, or name "
            "another one in CXX"
        )
    if find_ninja() is None:
        return "cuda_ref is built by ninja, which is not installed; pip install ninja"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return (
            f"cuda_ref is built against Python.h, which is not in {sysconfig.get_path('include')}; install "
            "the development files of Python"
        )
    if importlib.util.find_spec("setuptools") is None:
        return "torch.utils.cpp_extension needs setuptools, which is not installed; pip install setuptools"
    return None


def find_compiler() -> list[str]:
    """The C++ compiler that ``torch.utils.cpp_extension`` calls, found or not, with what stands before it."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def find_ninja() -> str | None:
    """Path of ninja: that in PATH, else that of the package ``ninja``."""
    found = shutil.which("ninja")
    if found is not None or importlib.util.find_spec("ninja") is None:
        return found
    # Its scripts are not in PATH when the interpreter is called by its path, as by a virtual environment.
    from ninja import BIN_DIR

    return shutil.which("ninja", path=BIN_DIR)


def find_nvcc() -> str | None:
    """Path of the nvcc that ``torch.utils.cpp_extension`` calls."""
    # Imported late: it looks for CUDA and imports setuptools.
    from torch.utils.cpp_extension import CUDA_HOME

    return None if CUDA_HOME is None else shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin"))


def has_mma() -> bool:
    """Whether every architecture that the CUDA build is for has the MMA instructions (sm_80).

    The architectures are those of ``TORCH_CUDA_ARCH_LIST``, else those of the devices.
    """
    return min(_capabilities(), default=_MMA_CAPABILITY) >= _MMA_CAPABILITY


def _capabilities() -> list[tuple[int, int]]:
    """Major and minor numbers of the architectures of the CUDA build."""
    listed = re.findall(r"(\d+)\.(\d)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if listed:
        return [(int(major), int(minor)) for major, minor in listed]
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def describe_toolchain(kind: Kind) -> str:
    """Versions of everything that a build depends on besides its sources and flags."""
    facts = [
        sysconfig.get_config_var("SOABI"),
        torch.__version__,
        platform.machine(),
        _ask_version(*find_compiler()),
    ]
    if kind == "cuda":
        facts += [
            _ask_version(find_nvcc() or "nvcc"),
            os.environ.get("TORCH_CUDA_ARCH_LIST"),
            _capabilities(),
        ]
    return repr(facts)


def _ask_version(*program: str) -> str:
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout
