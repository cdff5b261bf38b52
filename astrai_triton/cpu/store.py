"""Packed weights kept on disk, so that a model starts without dequantising and packing its checkpoint.

A file holds what ``CpuDecoder.packed_weights`` gave. It lies under ``cpu/weights`` in ``ASTRAI_HOME`` (else
``~/.cache/astrai``), one for each checkpoint, dtype, quantisation and instruction set: newer ones take the
place of older ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from astrai_triton.cpu.abi import Quantize
from astrai_triton.cpu.build import SOURCES, cache_root
from astrai_triton.cpu.decoder import CpuDecoder
from astrai_triton.cpu.isa import Isa, cpu_flags, list_isas
from astrai_triton.cpu.packed import PackedFile, PackedFileError, write_packed
from astrai_triton.model import ModelConfig

_MIB = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 30, 64 << 10
# What turns a checkpoint's files into packed weights.
_CODE = ("checkpoint", "cpu", "model")


@attrs.frozen(kw_only=True)
class SourceFile:
    """What a file of a checkpoint is recognised by, without reading all of it."""

    name: str
    num_bytes: int
    mtime_s: int
    """Whole seconds: images of containers keep no finer time."""
    sha256: str
    """Of its first and last MiB and of 64 KiB at 30 places between."""


@attrs.frozen(kw_only=True)
class PackedKey:
    """What packed weights are of. Build it with ``describe``."""

    place: str
    """Path of the checkpoint."""
    sources: tuple[SourceFile, ...]
    """Its files of weights."""
    config: ModelConfig
    dtype: torch.dtype
    quantize: Quantize
    isa: Isa
    code: str
    """SHA-256 of the code that reads checkpoints and packs weights."""


def describe(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    isa: Isa | None = None,
) -> PackedKey:
    """Say what the packed weights of a checkpoint are recognised by.

    A checkpoint that was replaced or edited is another one: its files have another size or time, or differ
    where they are sampled. Not noticed is a file in which few bytes between the samples were changed, and
    whose time was then put back, or that was changed within a second of its packing.

    Args:
        path: the ``.gguf`` file, or the directory with ``*.safetensors``.
        config: as the checkpoint is read with.
        dtype: of the model.
        quantize: as for ``CpuDecoder``.
        isa: as for ``CpuDecoder``.

    Raises:
        PackedFileError: a file cannot be read.
    """
    files = sorted(path.glob("*.safetensors*")) if path.is_dir() else [path]
    try:
        sources = tuple(_identify(file) for file in files)
    except OSError as error:
        raise PackedFileError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    return PackedKey(
        place=str(path.resolve()),
        sources=sources,
        config=config,
        dtype=dtype,
        quantize=quantize,
        isa=isa or list_isas(cpu_flags())[0],
        code=_hash_code(),
    )


class PackedStore:
    """A directory of packed weights.

    Several processes may use it at once. Who saves waits for others who do; who loads waits for nobody, and
    what it has begun to read stays whole.

    Args:
        root: the directory; None is ``cpu/weights`` in ``ASTRAI_HOME``. It is made when something is saved.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_root() / "weights" if root is None else root

    def find(self, key: PackedKey) -> Path | None:
        """The file with the packed weights of ``key``, if there is one. Its weights are not read.

        Raises:
            PackedFileError: the file in its place is damaged or cannot be read.
        """
        with self._open(key) as file:
            return None if file is None else file.path

    def load(
        self, key: PackedKey, *, threads: int | None = None, max_seq_len: int | None = None
    ) -> CpuDecoder | None:
        """A decoder with the packed weights of ``key``; None where there are none.

        Args:
            key: of the checkpoint as it is now.
            threads: as for ``CpuDecoder``; so many read, too.
            max_seq_len: as for ``CpuDecoder.from_packed``.

        Raises:
            PackedFileError: the file is damaged or cannot be read.
            BackendError, MemoryError, ValueError: as for ``CpuDecoder.from_packed``.
        """
        with self._open(key) as file:
            if file is None:
                return None
            return CpuDecoder.from_packed(
                key.config,
                functools.partial(file.read_into, threads=threads or torch.get_num_threads()),
                dtype=key.dtype,
                quantize=key.quantize,
                isa=key.isa,
                threads=threads,
                max_seq_len=max_seq_len,
            )

    def save(self, key: PackedKey, decoder: CpuDecoder) -> Path:
        """Keep the packed weights of a decoder, on the disk when this returns.

        What was kept for the same place, dtype, quantisation and instruction set is replaced, and what was
        kept for checkpoints that are gone is removed. After an error everything is as it was.

        Args:
            key: of the checkpoint that the decoder was loaded from, as it was before.
            decoder: packed.

        Returns:
            The file.

        Raises:
            PackedFileError: the directory cannot be written or has no room.
            ValueError: the decoder is not what the key says.
        """
        for name in ("config", "dtype", "quantize", "isa"):
            wanted, got = getattr(key, name), getattr(decoder, name)
            if wanted != got:
                raise ValueError(f"decoder: wanted {name} {wanted} as the key has it, got {got}")
        path = self._place(key)
        weights = decoder.packed_weights()
        try:
            with self._hold():
                self._sweep()
                temporary = path.with_suffix(".tmp")
                try:
                    write_packed(temporary, _to_json(key), weights, threads=torch.get_num_threads())
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)
                _sync(self.root)
        except OSError as error:
            raise PackedFileError(self._explain(error, len(weights))) from error
        return path

    @contextlib.contextmanager
    def _open(self, key: PackedKey) -> Iterator[PackedFile | None]:
        """The file of ``key``; None where there is none, or one of something else."""
        try:
            file = PackedFile(self._place(key))
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file if file.key == _to_json(key) else None

    def _place(self, key: PackedKey) -> Path:
        name = re.sub(r"[^\w.-]", "_", Path(key.place).name)[:80]
        place = hashlib.sha256(os.fsencode(key.place)).hexdigest()[:16]
        dtype = str(key.dtype).removeprefix("torch.")
        return self.root / f"{name}_{place}_{dtype}_{key.quantize}_{key.isa}.packed"

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Exclusive right to write, until this process leaves or dies."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        """Remove what a process left that died while it wrote, and what nobody will look for any more."""
        for path in self.root.glob("*.tmp"):
            path.unlink()
        for path in self.root.glob("*.packed"):
            # Damaged ones are for those who look for them.
            with contextlib.suppress(PackedFileError), PackedFile(path) as file:
                if not os.path.exists(file.key["place"]):
                    path.unlink()

    def _explain(self, error: OSError, num_bytes: int) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.root).free // _MIB
            return (
                f"{self.root} has no room for {num_bytes // _MIB} MiB of packed weights ({free} MiB are "
                "free); make room, or set ASTRAI_HOME to a directory on another disk"
            )
        return (
            f"packed weights are kept in {self.root}, which cannot be written ({error.strerror}); set "
            "ASTRAI_HOME to a directory that can"
        )


def _identify(path: Path) -> SourceFile:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256()
        last = max(status.st_size - _MIB, 0)
        places = [(last * i // (_NUM_SAMPLES + 1), _SAMPLE_BYTES) for i in range(1, _NUM_SAMPLES + 1)]
        for offset, count in [(0, _MIB), *places, (last, _MIB)]:
            digest.update(os.pread(file.fileno(), count, offset))
    return SourceFile(
        name=path.name,
        num_bytes=status.st_size,
        mtime_s=int(status.st_mtime),
        sha256=digest.hexdigest(),
    )


def _hash_code() -> str:
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    files = [file for name in _CODE for file in (package / name).glob("*.py")]
    for path in sorted([*files, *SOURCES.iterdir()]):
        digest.update(f"{path.name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _to_json(key: PackedKey) -> Any:
    """As it comes back from a file: tuples are lists."""
    fields = attrs.asdict(key) | {"dtype": str(key.dtype).removeprefix("torch.")}
    return json.loads(json.dumps(fields))


def _sync(directory: Path) -> None:
    """Wait until names of files are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
