"""The file that packed weights are kept in: what they are of, and their bytes with checksums.

=====  ==============================================================================================
bytes  what
=====  ==============================================================================================
16     ``MAGIC``, with the version of this layout
8      length of the header, little endian
32     SHA-256 of the header
any    header: JSON, with spaces behind it up to a multiple of 4096 from the beginning of the file
any    the weights, in pieces of which the header has the SHA-256
=====  ==============================================================================================

Every byte is under a checksum: a file that was cut off or damaged is refused, and nothing of it is used.

Weights are read into memory, not mapped. A mapped file has pages of 4 KiB, through which a stream of weights
misses the TLB at every page; the memory they are read into is on huge pages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from astrai_triton.errors import BackendError

MAGIC = b"astrai packed 1\n"
PIECE_BYTES = 2 << 20
"""A huge page, which a thread then fills alone, and little enough to be hashed out of its cache."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_ALIGNMENT = 4096
# Checksums of 2 TiB.
_MAX_HEADER_BYTES = 128 << 20
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32
_PREFIX_BYTES = len(MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES


class PackedFileError(BackendError):
    """A file of packed weights is damaged, is something else, or cannot be read or written."""


class PackedFile:
    """One that is there, open for reading; its header has been read and found whole.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: there is none.
        PackedFileError: it cannot be read, or is not a whole file of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refuse(f"cannot be opened ({error.strerror})") from error
        try:
            header = self._read_header()
        except BaseException:
            self.close()
            raise
        self.key: Any = header["key"]
        """What ``write_packed`` was given."""
        self.num_bytes: int = header["num_bytes"]
        """Of the weights."""
        self._digests: list[str] = header["sha256"]

    def __enter__(self) -> PackedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read_into(self, weights: memoryview, *, threads: int) -> None:
        """Read the weights and compare their checksums.

        Args:
            weights: bytes that receive them; after an error what is in them is worthless.
            threads: that read and compare.

        Raises:
            PackedFileError: the file is damaged, cannot be read, or holds another number of bytes.
        """
        if len(weights) != self.num_bytes:
            raise self._refuse(f"holds {self.num_bytes} bytes of weights, wanted {len(weights)}")

        def read(piece: tuple[memoryview, int, str]) -> None:
            view, offset, digest = piece
            self._read(view, self._start + offset)
            if hashlib.sha256(view).hexdigest() != digest:
                raise self._refuse(f"is damaged: a checksum differs, of bytes {offset} on of the weights")

        offsets = range(0, self.num_bytes, PIECE_BYTES)
        _for_each(threads, read, zip(_cut(weights), offsets, self._digests, strict=True))

    def _read_header(self) -> dict[str, Any]:
        size = os.fstat(self._fd).st_size
        prefix = bytearray(_PREFIX_BYTES)
        if size < _PREFIX_BYTES:
            raise self._refuse("is cut off")
        self._read(memoryview(prefix), 0)
        if not prefix.startswith(MAGIC):
            raise self._refuse("is no file of packed weights of this version")
        length = int.from_bytes(prefix[len(MAGIC) : -_DIGEST_BYTES], "little")
        self._start = _PREFIX_BYTES + length
        if self._start > size or length > _MAX_HEADER_BYTES:
            raise self._refuse("is cut off, or the length of its header is damaged")
        text = bytearray(length)
        self._read(memoryview(text), _PREFIX_BYTES)
        if hashlib.sha256(text).digest() != prefix[-_DIGEST_BYTES:]:
            raise self._refuse("is damaged: the checksum of its header differs")
        header: dict[str, Any] = json.loads(text)
        if size != self._start + header["num_bytes"]:
            raise self._refuse(f"has {size} bytes, wanted {self._start + header['num_bytes']}")
        return header

    def _read(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._refuse(f"cannot be read ({error.strerror})") from error
            if count == 0:
                raise self._refuse("was cut off while it was read")
            done += count

    def _refuse(self, what: str) -> PackedFileError:
        return PackedFileError(f"{self.path} {what}; remove it, and it is made anew from the checkpoint")


def write_packed(path: Path, key: Any, weights: memoryview, *, threads: int) -> None:
    """Write a file and wait until it is on the disk.

    Args:
        path: of the file, which is overwritten.
        key: JSON, says what the weights are of.
        weights: bytes.
        threads: that compute checksums.

    Raises:
        OSError: no room or no right to write; part of the file may be there.
    """
    digests = _for_each(threads, lambda piece: hashlib.sha256(piece).hexdigest(), _cut(weights))
    text = json.dumps({"key": key, "num_bytes": len(weights), "sha256": digests}).encode()
    text += b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        # A disk without room says so here, before minutes of writing.
        os.posix_fallocate(file.fileno(), 0, _PREFIX_BYTES + len(text) + len(weights))
        file.write(MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(text).digest() + text)
        file.write(weights)
        file.flush()
        os.fsync(file.fileno())


def _cut(weights: memoryview) -> Iterator[memoryview]:
    return (weights[start : start + PIECE_BYTES] for start in range(0, len(weights), PIECE_BYTES))


def _for_each(threads: int, function: Callable[[_Item], _Result], items: Iterator[_Item]) -> list[_Result]:
    """Results in order; the first error ends it. Reading and hashing let go of the interpreter's lock."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
