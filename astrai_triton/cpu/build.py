"""Builds the kernels on first use with the C++ compiler of the machine, and keeps what it built.

A build is one library without dependencies on torch or Python, called through ctypes, so it takes seconds. It
lies under ``cpu`` in ``ASTRAI_HOME`` (else ``~/.cache/astrai``), under a name that carries a hash of its
sources, flags, compiler and CPU: what changed is built again. Before it gets that name a process of its own
has run the kernels against plain loops, so that one that would crash or compute nonsense is never used.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from astrai_triton.cpu.abi import declare
from astrai_triton.cpu.isa import FLAGS, ISAS, Isa, cpu_flags, list_isas
from astrai_triton.errors import BackendError

SOURCES = Path(__file__).parent / "csrc"

# Nobody reads errno or traps of mathematical functions; neither flag changes a value.
_COMMON = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Warns of GCC's own headers.
    "-Wno-maybe-uninitialized",
)
_ERROR_LINES = 20
_COMPILE_SECONDS = 600.0
_CHECK_SECONDS = 120.0
_POLL_SECONDS = 0.2
_LOWEST_PRIORITY = 19
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).astrai_check())"


class BuildError(BackendError):
    """The kernels cannot be built here, the compiler refused them, or what it built is wrong."""


def why_not_build(isa: Isa | None = None) -> str | None:
    """Why the kernels cannot be built and run on this machine; None when they can. Builds nothing.

    Args:
        isa: for which instruction set; None is the fastest.

    Raises:
        ValueError: ``isa`` is not one of ``ISAS``.
    """
    if isa is not None and isa not in ISAS:
        raise ValueError(f"isa: wanted one of {', '.join(ISAS)}, got {isa!r}")
    if platform.system() != "Linux":
        return f"the CPU kernels need Linux, this is {platform.system()}"
    if isa is not None and isa not in list_isas(cpu_flags()):
        return f"this CPU has no {isa}; it has {', '.join(list_isas(cpu_flags()))}"
    program, *_ = _find_compiler()
    if shutil.which(program) is None:
        return (
            f"the CPU kernels are built by a C++17 compiler, and {program!r} is not in PATH; install g++, or "
            "name another one in CXX"
        )
    return None


def is_built(isa: Isa | None = None) -> bool:
    """Whether ``build`` finds the library in the cache, and so returns at once.

    Args:
        isa: as for ``build``.

    Raises:
        ValueError: ``isa`` is not one of ``ISAS``.
    """
    return why_not_build(isa) is None and _plan(isa)[2].exists()


def build(
    isa: Isa | None = None, *, defines: tuple[str, ...] = (), cancelled: threading.Event | None = None
) -> ctypes.CDLL:
    """The library, built unless it was before. Says so on stderr when it builds.

    Several processes may ask at once: one builds, the others wait.

    Args:
        isa: instruction set to build for; None is the fastest this CPU has.
        defines: further flags of the compiler, such as ``-fsanitize=address``.
        cancelled: makes it a build in the background: quiet, at the lowest priority, and given up once the
            event is set.

    Returns:
        The functions of ``csrc/api.cpp``, with types.

    Raises:
        BuildError: ``why_not_build`` has a reason, the cache cannot be written, the compiler failed, the
            library failed its check, or the build was cancelled.
        ValueError: ``isa`` is not one of ``ISAS``.
    """
    reason = why_not_build(isa)
    if reason is not None:
        raise BuildError(reason)
    chosen, command, path = _plan(isa, defines)
    if not path.exists():
        with _hold(path):
            # Whoever held it before may have built it.
            if not path.exists():
                _compile(command, chosen, path, cancelled)
    with _lock:
        return _load(chosen, path)


_lock = threading.Lock()


def _plan(isa: Isa | None, defines: tuple[str, ...] = ()) -> tuple[Isa, tuple[str, ...], Path]:
    """Instruction set, compiler command without files, and where the library is or will be."""
    chosen = isa or list_isas(cpu_flags())[0]
    command = (*_find_compiler(), *_COMMON, *FLAGS[chosen], *defines)
    return chosen, command, cache_root() / f"kernels_{chosen}_{_hash_build(command)}.so"


@functools.cache
def _load(isa: Isa, path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        declare(library)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}; remove it") from error
    if library.astrai_prepare() != 0:
        raise BuildError(f"the system does not let this process use {isa}; choose a smaller instruction set")
    return library


def _compile(command: tuple[str, ...], isa: Isa, path: Path, cancelled: threading.Event | None) -> None:
    if cancelled is None:
        _tell(f"building the CPU kernels for {isa}, some seconds, once, in {path.parent}")
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
        status, said = _run([*command, *sources, "-o", str(made)], _COMPILE_SECONDS, cancelled)
        if status != 0:
            last = "\n".join(f"  {line[:400]}" for line in said.splitlines()[:_ERROR_LINES])
            raise BuildError(f"the CPU kernels for {isa} do not build; {command[0]} says:\n{last}")
        # Where a crash costs nothing.
        check = [sys.executable, "-I", "-S", "-c", _CHECK, str(made)]
        status, said = _run(check, _CHECK_SECONDS, cancelled)
        if status != 0:
            raise BuildError(
                f"the CPU kernels for {isa} built, but failed their check (status {status}): "
                f"{said.strip()[-400:]}"
            )
        made.replace(path)


def _run(command: list[str], timeout_s: float, cancelled: threading.Event | None) -> tuple[int, str]:
    """Exit status and stderr of a command, which must not outlive the wish for it."""
    deadline = time.monotonic() + timeout_s
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A group, because a compiler starts others.
        start_new_session=True,
    ) as process:
        try:
            if cancelled is not None:
                os.setpriority(os.PRIO_PGRP, process.pid, _LOWEST_PRIORITY)
            while True:
                try:
                    _, said = process.communicate(timeout=_POLL_SECONDS)
                    return process.returncode, said
                except subprocess.TimeoutExpired:
                    pass
                if cancelled is not None and cancelled.is_set():
                    raise BuildError("the build of the CPU kernels was given up")
                if time.monotonic() > deadline:
                    raise BuildError(f"{command[0]} did not end within {timeout_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _find_compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _hash_build(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(repr((command, version, platform.machine(), sorted(cpu_flags()))).encode())
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """Directory of what is made once for the CPU and kept: ``cpu`` in ``ASTRAI_HOME``."""
    home = os.environ.get("ASTRAI_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "astrai") / "cpu"


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Exclusive right to build ``path``, until this process leaves or dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise BuildError(
            f"the CPU kernels are built in {path.parent}, which cannot be written ({error.strerror}); set "
            "ASTRAI_HOME to a directory that can"
        ) from error
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - seconds of silence would look like a hang
