"""The GGUF container: header, metadata and tensor table; tensors are memory-mapped and dequantised on demand.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The header
is parsed here because every length in it has to be checked against the file, and because a vocabulary of 10^5
strings has to load in well under a second; block formats and their sizes come from the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from astrai_triton.errors import CorruptFileError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPES = {
    int(kind): kind
    for kind in (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    )
}
_Bytes = npt.NDArray[np.uint8]


@attrs.frozen
class TensorEntry:
    """One row of the tensor table.

    Args:
        name: as in the file.
        shape: rows first, as torch has it.
        kind: the block format.
        offset: first byte in the file.
        num_bytes: size as stored.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file.

    Args:
        path: the file.

    Raises:
        CorruptFileError: not a GGUF file, truncated, or its header contradicts itself.
        UnsupportedModelError: another version or byte order, or a tensor of a type that is not implemented.
    """

    metadata: dict[str, Any]
    """Key -> int, float, bool, str or a list of these."""
    entries: dict[str, TensorEntry]
    """Tensor name -> where it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != _MAGIC:
                raise CorruptFileError(
                    f"{path}: not a GGUF file (it begins with {magic!r}, wanted {_MAGIC!r})"
                )
            if size < 24:
                raise CorruptFileError(
                    f"{path}: truncated: {size} bytes cannot hold a GGUF header; fetch it again"
                )
            # Copy-on-write: torch wants writable memory, and nothing must reach the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes: _Bytes = np.frombuffer(mapped, np.uint8)
        cursor = _Cursor(mapped, path)
        cursor.offset = 4
        _check_version(cursor)
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = cursor.metadata(num_keys)
        self.entries = cursor.tensor_table(num_tensors, self.metadata.get("general.alignment", 32))

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def tensor(self, name: str) -> Tensor:
        """A tensor: F32, F16 and BF16 as a view of the file, everything else dequantised to float32.

        Raises:
            KeyError: no tensor of that name.
        """
        entry = self.entries[name]
        raw = self._bytes[entry.offset : entry.offset + entry.num_bytes]
        if entry.kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).reshape(entry.shape)
        if entry.kind == GGMLQuantizationType.F16:
            return torch.from_numpy(raw.view(np.float16)).reshape(entry.shape)
        if entry.kind == GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32)).reshape(entry.shape)
        if entry.kind == GGMLQuantizationType.Q4_1:
            return torch.from_numpy(_dequantize_q4_1(raw)).reshape(entry.shape)
        rows = raw.reshape(math.prod(entry.shape[:-1]), -1)
        return torch.from_numpy(dequantize(rows, entry.kind)).reshape(entry.shape)


def _dequantize_q4_1(raw: _Bytes) -> npt.NDArray[np.float32]:
    """``gguf.quants.dequantize`` for Q4_1, the same bits in a third of the time: the default model's format.

    A block of 20 bytes holds scale and minimum (float16) and 32 values of 4 bits: value * scale + minimum.
    """
    blocks = raw.reshape(-1, 20)
    out = np.empty((blocks.shape[0], 32), np.float32)
    # 4096 blocks at a time: all intermediate arrays stay in the second-level cache.
    for start in range(0, blocks.shape[0], 4096):
        chunk = blocks[start : start + 4096]
        scales = np.ascontiguousarray(chunk[:, :4]).view(np.float16).astype(np.float32)
        nibbles = np.ascontiguousarray(chunk[:, 4:])
        values = out[start : start + 4096]
        halves = values.reshape(-1, 2, 16)
        halves[:, 0] = nibbles & 0x0F
        halves[:, 1] = nibbles >> 4
        values *= scales[:, :1]
        values += scales[:, 1:]
    return out


def _check_version(cursor: _Cursor) -> None:
    version = cursor.scalar("I")
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(
            f"{cursor.path}: big-endian GGUF is not implemented; use the little-endian file"
        )
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{cursor.path}: GGUF version {version} is not implemented; choices: "
            f"{', '.join(map(str, _VERSIONS))}; convert the model with a current tool"
        )


class _Cursor:
    """Reads the header from front to back and never past the end of the file."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self.view = view
        self.path = path
        self.offset = 0

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code))
        (value,) = struct.unpack_from("<" + code, self.view, start)
        # The decimal that was meant: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def take(self, count: int) -> int:
        """Move on by ``count`` bytes and return where they begin."""
        start = self.offset
        if count > len(self.view) - start:
            raise CorruptFileError(
                f"{self.path}: truncated: the header needs {count} bytes at byte {start}, "
                f"the file has {len(self.view)}; fetch it again"
            )
        self.offset = start + count
        return start

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        try:
            return self.view[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{self.path}: the text at byte {start} is not UTF-8: {error}") from error

    def strings(self, count: int) -> list[str]:
        """``count`` times ``string``, unrolled: vocabularies are what makes a header long."""
        view, end, start = self.view, len(self.view), self.offset
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                stop = start + 8 + (read_length(view, start)[0] if start <= end - 8 else end)
                if stop > end:
                    raise CorruptFileError(
                        f"{self.path}: truncated: the text at byte {start} ends past the file's {end} bytes; "
                        "fetch it again"
                    )
                strings.append(view[start + 8 : stop].decode("utf-8"))
                start = stop
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{self.path}: the text at byte {start} is not UTF-8: {error}") from error
        self.offset = start
        return strings

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            if key in values:
                raise CorruptFileError(f"{self.path}: the key {key!r} is there twice")
            values[key] = self.value(self.scalar("I"), key)
        return values

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"), key)
        return self.scalar(self.code(kind, key))

    def array(self, kind: int, count: int, key: str) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        code = self.code(kind, key)
        start = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.view, start))

    def code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise CorruptFileError(f"{self.path}: key {key!r}: unknown value type {kind}")
        return _SCALARS[kind]

    def tensor_table(self, count: int, alignment: object) -> dict[str, TensorEntry]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise CorruptFileError(
                f"{self.path}: key 'general.alignment': wanted a power of two, got {alignment!r}"
            )
        rows = [self.tensor_row() for _ in range(count)]
        data_start = -(-self.offset // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for row in rows:
            entry = attrs.evolve(row, offset=data_start + row.offset)
            end = entry.offset + entry.num_bytes
            if row.offset % alignment or end > len(self.view):
                raise CorruptFileError(
                    f"{self.path}: truncated or damaged: tensor {entry.name!r} lies in bytes "
                    f"{entry.offset}..{end}, the file has {len(self.view)}; fetch it again"
                )
            if entry.name in entries:
                raise CorruptFileError(f"{self.path}: the tensor {entry.name!r} is there twice")
            entries[entry.name] = entry
        return entries

    def tensor_row(self) -> TensorEntry:
        """One row of the table, its offset still relative to the data section."""
        name = self.string()
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CorruptFileError(
                f"{self.path}: tensor {name!r}: wanted 1..{_MAX_DIMS} axes, got {num_dims}"
            )
        shape = tuple(reversed([self.scalar("Q") for _ in range(num_dims)]))
        raw_kind, offset = self.scalar("I"), self.scalar("Q")
        if raw_kind not in _TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has type {_spell(raw_kind)}, which is not implemented; "
                f"choices: {', '.join(kind.name for kind in _TYPES.values())}"
            )
        kind = _TYPES[raw_kind]
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_len or 0 in shape:
            raise CorruptFileError(
                f"{self.path}: tensor {name!r}: shape {list(shape)} does not divide into blocks "
                f"of {block_len}"
            )
        return TensorEntry(name, shape, kind, offset, math.prod(shape) // block_len * block_bytes)


def _spell(raw_kind: int) -> str:
    try:
        return str(GGMLQuantizationType(raw_kind).name)
    except ValueError:
        return f"{raw_kind} (unknown)"
