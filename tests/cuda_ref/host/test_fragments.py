"""Which element each register of a lane holds, by the PTX manual's formulas for m16n8k16 and ldmatrix."""

from __future__ import annotations

import numpy as np
import pytest

# Of the manual: groupID = laneid >> 2, threadID_in_group = laneid % 4, and for element i of a fragment
#   a (16 x 16): row = groupID for 0 <= i < 2 or 4 <= i < 6, else groupID + 8
#                col = threadID_in_group * 2 + (i & 1) for i < 4, and 8 more from there on
#   b (16 x 8):  row = threadID_in_group * 2 + (i & 1) for i < 2, and 8 more from there on; col = groupID
#   d (16 x 8):  row = groupID for i < 2, else groupID + 8; col = threadID_in_group * 2 + (i & 1)


def _place_of_a(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, member * 2 + (i & 1) + (8 if i >= 4 else 0)


def _place_of_b(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def _place_of_d(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def _patterns(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _multiply(minis, dtype: str, a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d + a b by one warp; the fragments are filled, and read, by the formulas."""
    halves = np.zeros((32, 12), np.uint16)
    registers = np.zeros((32, 4), np.float32)
    for lane in range(32):
        halves[lane, :8] = [_patterns(a[_place_of_a(lane, i)], dtype) for i in range(8)]
        halves[lane, 8:] = [_patterns(b[_place_of_b(lane, i)], dtype) for i in range(4)]
        registers[lane] = [d[_place_of_d(lane, i)] for i in range(4)]
    out = minis.run(f"mma_kernel<{dtype}>", x=halves.view(np.uint32), out=registers)
    result = np.full((16, 8), np.nan, np.float32)
    for lane in range(32):
        for i in range(4):
            result[_place_of_d(lane, i)] = out[lane, i]
    return result


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma_multiplies_the_fragments_of_the_manual(minis, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        a, b = rng.integers(-16, 17, (16, 16)), rng.integers(-16, 17, (16, 8))
        d = rng.integers(-1000, 1000, (16, 8))
        assert (_multiply(minis, dtype, a, b, d) == d + a @ b).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma_adds_up_in_float32(minis, dtype: str) -> None:
    rng = np.random.default_rng(1)
    a, b, d = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8), (16, 8)))
    if dtype == "bf16":
        a, b = ((m.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32) for m in (a, b))
    want = d.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    magnitude = np.abs(d).astype(np.float64) + np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    # 16 sums, each rounded to 24 bits.
    assert (np.abs(_multiply(minis, dtype, a, b, d) - want) <= 16 * 2.0**-24 * magnitude).all()


def test_mma_passes_infinities_and_nans_on_to_their_rows_and_columns(minis) -> None:
    a, b, d = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8))
    a[3, 5], b[7, 2] = np.inf, np.nan
    out = _multiply(minis, "f16", a, b, d)
    want = np.full((16, 8), 16.0)
    want[3], want[:, 2] = np.inf, np.nan
    assert np.array_equal(out, want, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_out_the_rows_that_lanes_point_at(minis, transposed: bool) -> None:
    elements = np.arange(40 * 8, dtype=np.uint16).reshape(40, 8)
    for rows in (np.arange(32), np.random.default_rng(2).integers(0, 40, 32)):
        out = minis.run(
            "ldmatrix_kernel",
            x=elements,
            y=rows.astype(np.int32),
            out=np.zeros((32, 4), np.uint32),
            n=int(transposed),
        )
        for lane in range(32):
            for matrix in range(4):
                m = elements[rows[8 * matrix : 8 * matrix + 8]]
                m = m.T if transposed else m
                low, high = m[lane // 4, 2 * (lane % 4)], m[lane // 4, 2 * (lane % 4) + 1]
                assert out[lane, matrix] == int(low) | int(high) << 16, (lane, matrix)
