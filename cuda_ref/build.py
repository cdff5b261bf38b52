"""Builds the kernels on first use, through ``torch.utils.cpp_extension.load``, and keeps what it built.

A build lies in torch's cache of extensions (``TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``)
under a name that carries a hash of its sources, flags and tools: what changed is built again, and nothing
stale is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import attrs

from astrai_triton.errors import BackendError
from cuda_ref.toolchain import Kind, describe_toolchain, find_ninja, has_mma, why_not_build

ROOT = Path(__file__).parent
"""Holds ``csrc`` and ``host``; headers are included relative to it."""

# What takes longest comes first.
_SOURCES = ("csrc/bindings.cpp", "csrc/kernels/*.cu")
_SOURCES_OF_HOST = ("host/*.cpp",)
_HASHED = ("csrc/*", "csrc/kernels/*", "host/*")
_ERROR_LINES = 30
# There once a build is complete.
_STAMP = "complete"

# ASTRAI_HOST makes device.cuh take the runtime of the CPU. Contraction is off, so that float32 results do not
# depend on the machine. Builds of one process must not share symbols: they may differ in anything.
_HOST_FLAGS = (
    "-x c++",
    "-O2",
    "-std=c++17",
    "-DASTRAI_HOST",
    "-ffp-contract=off",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
)
_CUDA_CFLAGS = ("-O2", "-std=c++17", "-fvisibility=hidden", "-fno-gnu-unique")
_NVCC_FLAGS = ("-O3", "-std=c++17")


class BuildError(BackendError):
    """The kernels cannot be built here, or the compiler refused them."""


@attrs.frozen(kw_only=True)
class Recipe:
    """What one build is made of."""

    kind: Kind
    root: Path = ROOT
    """Directory with ``csrc`` and ``host``."""
    head_dims: tuple[int, ...] | None = None
    """Ascending head dims that attention is instantiated for; None is all."""
    defines: tuple[str, ...] = ()
    """Further macros, ``NAME`` or ``NAME=VALUE``."""


def build(
    kind: Kind,
    *,
    root: Path = ROOT,
    head_dims: Sequence[int] | None = None,
    defines: Sequence[str] = (),
) -> ModuleType:
    """The extension module, built unless it lies in the cache already. Says so on stderr when it builds.

    Several processes may ask for the same build at once: one builds, the others wait. One that was killed in
    the middle leaves nothing that would keep the next one waiting.

    Args:
        kind: "host" runs the kernels on the CPU under the checking runtime, "cuda" on a CUDA device.
        root: directory that holds ``csrc`` and ``host``; other than the package's for altered copies.
        head_dims: ascending head dims that attention is instantiated for, each a multiple of 32; fewer
            compile faster. None is all.
        defines: further macros, ``NAME`` or ``NAME=VALUE``.

    Returns:
        The module: ``AttnParams RotaryParams MergeParams Dtype Variant Pairing``, the entry points,
        ``is_host``, ``has_mma``; on the host also ``CheckError``, which a kernel that breaks a rule raises.

    Raises:
        BuildError: ``why_not_build`` has a reason, the cache cannot be written, or the compiler failed.
        ValueError: ``kind`` is unknown.
    """
    reason = why_not_build(kind)
    if reason is not None:
        raise BuildError(reason)
    dims = None if head_dims is None else tuple(head_dims)
    with _lock:
        return _load(Recipe(kind=kind, root=root, head_dims=dims, defines=tuple(defines)))


# Threads that ask at once must not build at once: torch counts builds of a name without a lock.
_lock = threading.Lock()


@functools.cache
def _load(recipe: Recipe) -> ModuleType:
    name = name_build(recipe)
    directory = _cache_root() / name
    with _hold_directory(directory):
        if (directory / _STAMP).exists():
            return _import(name, directory)
        _announce(recipe, directory)
        module = _compile(recipe, name, directory)
        (directory / _STAMP).touch()
    return module


def _compile(recipe: Recipe, name: str, directory: Path) -> ModuleType:
    from torch.utils import cpp_extension

    is_host, macros = recipe.kind == "host", list(_macros(recipe))
    try:
        with _ninja_in_path():
            module: ModuleType = cpp_extension.load(
                name,
                [str(source) for source in find_sources(recipe)],
                extra_cflags=[*(_HOST_FLAGS if is_host else _CUDA_CFLAGS), *macros],
                extra_cuda_cflags=[*_NVCC_FLAGS, *macros],
                extra_include_paths=[str(recipe.root)],
                build_directory=str(directory),
                # The .cu files of the host build are C++, whatever their name says.
                with_cuda=not is_host,
            )
    except (RuntimeError, OSError, ImportError) as error:
        # torch takes a name that it has seen for built, so a second attempt would import what is not there.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        raise BuildError(_describe_failure(recipe, directory, str(error))) from error
    return module


def _import(name: str, directory: Path) -> ModuleType:
    """A module that is built; its name says that it is what the sources give, whatever dates files have."""
    spec = importlib.util.spec_from_file_location(name, directory / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_sources(recipe: Recipe) -> list[Path]:
    """The files that are compiled."""
    patterns = (*_SOURCES, *_SOURCES_OF_HOST) if recipe.kind == "host" else _SOURCES
    return [path for pattern in patterns for path in sorted(recipe.root.glob(pattern))]


def name_build(recipe: Recipe) -> str:
    """Name of the module: the kind, and a hash of everything that the build depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _HASHED for path in recipe.root.glob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(recipe.root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    flags = (_HOST_FLAGS, _CUDA_CFLAGS, _NVCC_FLAGS, tuple(_macros(recipe)))
    digest.update(repr((str(recipe.root), flags, describe_toolchain(recipe.kind))).encode())
    return f"cuda_ref_{recipe.kind}_{digest.hexdigest()[:16]}"


def _macros(recipe: Recipe) -> Iterator[str]:
    if recipe.head_dims is not None:
        yield f"-DASTRAI_HEAD_DIMS={','.join(map(str, recipe.head_dims))}"
    if recipe.kind == "cuda" and not has_mma():
        yield "-DASTRAI_NO_MMA"
    for macro in recipe.defines:
        yield f"-D{macro}"


def _cache_root() -> Path:
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


@contextlib.contextmanager
def _hold_directory(directory: Path) -> Iterator[None]:
    """Exclusive use of a build directory by this process, until it leaves or dies.

    torch locks by the existence of a file, which outlives a process that was killed; the system's lock does
    not, and whoever holds it knows that a file left there is nobody's.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = (directory / "held").open("w")
    except OSError as error:
        raise BuildError(
            f"cuda_ref is built in {directory}, which cannot be written ({error.strerror}); set "
            "TORCH_EXTENSIONS_DIR to a directory that can"
        ) from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell("waiting for another process that builds cuda_ref")
            fcntl.flock(held, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _ninja_in_path() -> Iterator[None]:
    """torch calls ninja by its bare name."""
    ninja, before = find_ninja(), os.environ.get("PATH", "")
    assert ninja is not None
    os.environ["PATH"] = f"{before}{os.pathsep}{Path(ninja).parent}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _announce(recipe: Recipe, directory: Path) -> None:
    what = "for the CPU, about a minute" if recipe.kind == "host" else "with nvcc, some minutes"
    _tell(f"building cuda_ref {what}, once, in {directory}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _describe_failure(recipe: Recipe, directory: Path, output: str) -> str:
    """The end of what the compiler said, and where the rest can be had."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-_ERROR_LINES:]
    earlier = [line for line in lines[:-_ERROR_LINES] if "error" in line]
    if earlier:
        last = [*earlier[: _ERROR_LINES // 3], "...", *last]
    text = "\n".join(f"  {line[:400]}" for line in last)
    return (
        f"the {recipe.kind} build of cuda_ref failed; run ninja -v in {directory} for all of its output, "
        f"which ends so:\n{text}"
    )
