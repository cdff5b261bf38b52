"""The file of packed weights: whole or refused."""

from __future__ import annotations

import pytest

from astrai_triton.cpu import PackedFileError, packed
from astrai_triton.cpu.packed import PackedFile, write_packed

KEY = {"of": "something", "sizes": [1, 2.5, None]}
WEIGHTS = bytes(i * i % 251 for i in range(10_000))


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file of three pieces."""
    monkeypatch.setattr(packed, "PIECE_BYTES", 4096)
    path = tmp_path / "weights.packed"
    write_packed(path, KEY, memoryview(WEIGHTS), threads=2)
    return path


def read(path, threads=2):
    with PackedFile(path) as file:
        weights = bytearray(file.num_bytes)
        file.read_into(memoryview(weights), threads=threads)
        return file.key, bytes(weights)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_was_written_is_read(path, threads):
    assert read(path, threads) == (KEY, WEIGHTS)


def test_weights_begin_on_a_page(path):
    whole = path.read_bytes()
    assert whole.endswith(WEIGHTS)
    assert (len(whole) - len(WEIGHTS)) % 4096 == 0


def test_no_weights_at_all(tmp_path):
    write_packed(tmp_path / "empty", KEY, memoryview(b""), threads=1)
    assert read(tmp_path / "empty") == (KEY, b"")


def test_a_flipped_bit_anywhere_is_noticed(path):
    whole = path.read_bytes()
    for offset in [*range(64), *range(64, len(whole), 61), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        with pytest.raises(PackedFileError, match=f"{path}.*remove it"):
            read(path)


def test_a_file_of_another_length_is_refused(path):
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(PackedFileError, match="remove it"):
            PackedFile(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(PackedFileError, match=f"has {len(whole) + 1} bytes, wanted {len(whole)}"):
        PackedFile(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(path):
    whole = path.read_bytes()
    with PackedFile(path) as file:
        path.write_bytes(whole[:-100])
        with pytest.raises(PackedFileError, match="cut off while it was read"):
            file.read_into(memoryview(bytearray(file.num_bytes)), threads=1)


def test_something_else_is_named_as_such(tmp_path):
    (tmp_path / "text").write_text("GGUF" * 100)
    with pytest.raises(PackedFileError, match="is no file of packed weights of this version"):
        PackedFile(tmp_path / "text")
    with pytest.raises(PackedFileError, match=r"cannot be (opened|read)"):
        PackedFile(tmp_path)
    with pytest.raises(FileNotFoundError):
        PackedFile(tmp_path / "nothing")


def test_memory_of_another_size_is_refused(path):
    with PackedFile(path) as file, pytest.raises(PackedFileError, match=r"holds 10000 bytes.*wanted 9999"):
        file.read_into(memoryview(bytearray(9999)), threads=1)
