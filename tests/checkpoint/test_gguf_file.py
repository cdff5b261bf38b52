"""The GGUF container: block formats against the ``gguf`` package, and every way a header can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from astrai_triton.checkpoint.gguf_file import GgufFile
from astrai_triton.errors import CorruptFileError, UnsupportedModelError

Write = Callable[..., Path]
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: GGMLQuantizationType, rows: int, row_len: int) -> np.ndarray:
    """Any bytes are valid blocks; NaN and infinite scales are possible, and have to come out the same."""
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (rows, row_len // block_len * block_bytes)
    return np.random.default_rng(int(kind)).integers(0, 256, shape, dtype=np.uint8)


def header(
    *, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b""
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor_row(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_every_block_format_gives_the_bits_of_the_gguf_package(name: str, write_gguf: Write) -> None:
    kind = GGMLQuantizationType[name]
    blocks = random_blocks(kind, 6, 512)
    got = GgufFile(write_gguf(tensors={"x": (blocks, kind)})).tensor("x")
    wanted = gguf.quants.dequantize(blocks, kind)
    assert got.shape == (6, 512)
    assert got.dtype == torch.float32
    # As integers, so that NaN equals NaN; its sign and payload are nobody's promise.
    same = (got.numpy().view(np.uint32) == wanted.view(np.uint32)) | (
        np.isnan(got.numpy()) & np.isnan(wanted)
    )
    assert same.all()


def test_q4_1_is_right_over_many_chunks(write_gguf: Write) -> None:
    values = np.random.default_rng(0).normal(size=(300, 512)).astype(np.float32)
    blocks = gguf.quants.quantize(values, GGMLQuantizationType.Q4_1)
    got = GgufFile(write_gguf(tensors={"x": (blocks, GGMLQuantizationType.Q4_1)})).tensor("x")
    assert np.array_equal(got.numpy(), gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_1))


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_float_tensors_keep_their_type_and_values(name: str, dtype: torch.dtype, write_gguf: Write) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    got = GgufFile(write_gguf(tensors={"x": (gguf.quants.quantize(values, kind), kind)})).tensor("x")
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(values).to(dtype))


def test_writing_into_a_tensor_does_not_reach_the_file(write_gguf: Write) -> None:
    path = write_gguf()
    before = path.read_bytes()
    GgufFile(path).tensor("output_norm.weight").zero_()
    assert path.read_bytes() == before


def test_metadata_comes_as_plain_values(write_gguf: Write) -> None:
    given = {
        "a.text": "Ġwörter",
        "a.yes": True,
        "a.number": 7,
        "a.small": 1e-5,
        "a.texts": ["", "a", "▁b"],
        "a.numbers": [1, -2, 3],
        "a.scores": [0.5, -1.25],
        "a.none": 0,
    }
    metadata = GgufFile(write_gguf(general=given)).metadata
    assert {name: metadata[name] for name in given} == given
    assert {type(metadata[name]) for name in given} == {str, bool, int, float, list}


def test_metadata_agrees_with_the_gguf_package(write_gguf: Write) -> None:
    path = write_gguf(general={"a.texts": ["x", "y"], "a.numbers": [1, 2]})
    fields = gguf.GGUFReader(path).fields
    wanted = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    epsilon = wanted.pop("llama.attention.layer_norm_rms_epsilon")
    got = GgufFile(path).metadata
    assert got.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(epsilon, rel=1e-7)
    assert got == wanted


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + b"0" * 100, "not a GGUF file.*PK"),
        (b"GGUF\x03\x00\x00\x00", "truncated: 8 bytes"),
        (header(keys=1), "truncated: the header needs 8 bytes at byte 24"),
        (header(keys=1, rest=struct.pack("<Q", 2**60) + b"abc"), "truncated"),
        (header(keys=2**60), "truncated"),
        (header(tensors=2**60), "truncated"),
        (header(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 4, 2**60))), "truncated"),
        (header(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 8, 2**60))), "truncated"),
        (header(keys=1, rest=key(b"a", 99, b"")), "key 'a': unknown value type 99"),
        (header(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 9, 1))), "unknown value type 9"),
        (header(keys=1, rest=key(b"a", 9, struct.pack("<IQQ", 8, 1, 2**60))), "text at byte 49 ends past"),
        (header(keys=1, rest=text(b"\xff\xfe")), "not UTF-8"),
        (
            header(keys=1, rest=key(b"a", 9, struct.pack("<IQ", 8, 1) + text(b"\xff"))),
            "text at byte 49 is not UTF-8",
        ),
        (header(keys=2, rest=key(b"a", 0, b"\x01") * 2), "key 'a' is there twice"),
        (header(tensors=1, rest=tensor_row(b"t", (4,))), "tensor 't' lies in bytes 64..80, the file has 57"),
        (header(tensors=1, rest=tensor_row(b"t", (4,), offset=3) + bytes(99)), "tensor 't' lies in"),
        (header(tensors=1, rest=tensor_row(b"t", (2**62, 2**62)) + bytes(99)), "truncated or damaged"),
        (header(tensors=1, rest=tensor_row(b"t", (1, 1, 1, 1, 1))), "wanted 1..4 axes, got 5"),
        (header(tensors=1, rest=tensor_row(b"t", ())), "wanted 1..4 axes, got 0"),
        (header(tensors=1, rest=tensor_row(b"t", (0,))), "does not divide into blocks"),
        (header(tensors=1, rest=tensor_row(b"t", (33,), kind=3)), "does not divide into blocks of 32"),
        (header(tensors=2, rest=tensor_row(b"t", (1,)) * 2 + bytes(99)), "tensor 't' is there twice"),
        (
            header(keys=1, rest=key(b"general.alignment", 4, struct.pack("<I", 12))),
            "general.alignment.*power of two, got 12",
        ),
        (header(keys=1, rest=key(b"general.alignment", 8, text(b"x"))), "power of two, got 'x'"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_where(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"bad\.gguf: .*{told}"):
        GgufFile(path)


def test_a_file_cut_anywhere_is_an_error(write_gguf: Write) -> None:
    path = write_gguf()
    content = path.read_bytes()
    for size in [*range(0, 2000, 37), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CorruptFileError):
            GgufFile(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (header(version=1), "version 1 is not implemented"),
        (header(version=4), "version 4 is not implemented"),
        (header(version=0x03000000), "big-endian"),
        (
            header(tensors=1, rest=tensor_row(b"t", (256,), kind=10)),
            "tensor 't' has type Q2_K.*choices: F32, F16",
        ),
        (header(tensors=1, rest=tensor_row(b"t", (4,), kind=999)), r"tensor 't' has type 999 \(unknown\)"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=told):
        GgufFile(path)


def test_an_unknown_tensor_name_is_a_key_error(write_gguf: Write) -> None:
    with pytest.raises(KeyError):
        GgufFile(write_gguf()).tensor("nothing")


def test_sizes_are_those_of_the_file(write_gguf: Write) -> None:
    kind = GGMLQuantizationType.Q6_K
    file: Any = GgufFile(write_gguf(tensors={"x": (random_blocks(kind, 2, 256), kind)}))
    assert file.entries["x"].num_bytes == 2 * 210
    assert file.num_bytes == sum(entry.num_bytes for entry in file.entries.values())
