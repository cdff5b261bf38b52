"""Textbook kernels give the right results, and nothing about them is reported."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import DTypeLike

LANES = np.arange(32)


def test_a_block_sums_through_shuffles_and_shared_memory(minis) -> None:
    x = np.random.default_rng(0).integers(-100, 100, (5, 1000)).astype(np.float32)
    out = minis.run("sum_kernel", x=x, out=np.zeros(5, np.float32), n=1000, grid=(5, 1, 1), threads=256)
    assert (out == x.sum(1)).all()


def test_a_transpose_through_shared_memory_is_exact(minis) -> None:
    x = np.random.default_rng(1).standard_normal((96, 96)).astype(np.float32)
    out = minis.run("transpose_kernel", x=x, out=np.zeros_like(x), n=96, grid=(3, 3, 1), threads=256)
    assert (out == x.T).all()


def test_a_scan_by_shuffles_and_totals_of_warps_is_a_running_sum(minis) -> None:
    x = np.random.default_rng(2).integers(-1000, 1000, (3, 256)).astype(np.int32)
    out = minis.run("scan_kernel", x=x, out=np.zeros_like(x), grid=(3, 1, 1), threads=256)
    assert (out == x.cumsum(1)).all()


def _source(mode: int, lane: int, operand: int, width: int) -> int:
    """The lane that a lane reads, by the CUDA programming guide; of the operand five bits count."""
    segment, operand = lane // width * width, operand % 32
    if mode == 0:
        return segment + operand % width
    if mode == 1:
        return lane - operand if lane - operand >= segment else lane
    if mode == 2:
        return lane + operand if lane + operand < segment + width else lane
    return lane ^ operand if (lane ^ operand) < segment + width else lane


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
@pytest.mark.parametrize("mode", range(4), ids=["idx", "up", "down", "xor"])
def test_shuffles_read_the_lane_of_the_programming_guide(minis, mode: int, dtype: DTypeLike) -> None:
    name = {np.float32: "float", np.int32: "int", np.float64: "double"}[dtype]
    x = np.random.default_rng(3).integers(-(2**23), 2**23, 32).astype(dtype)
    for width in (1, 2, 4, 8, 16, 32):
        for operand in (0, 1, 2, 3, 5, 8, 15, 16, 21, 31, 33, 40):
            y = np.array([mode, operand, width, 0], np.int32)
            out = minis.run(f"shuffle_kernel<{name}>", x=x, y=y, out=np.zeros_like(x), n=-1)
            want = [x[_source(mode, lane, operand, width)] for lane in range(32)]
            assert (out == want).all(), (width, operand)


def test_a_shuffle_of_some_lanes_leaves_the_others_alone(minis) -> None:
    x = np.arange(32, dtype=np.int32)
    y = np.array([3, 1, 32, 0], np.int32)
    out = minis.run("shuffle_kernel<int>", x=x, y=y, out=np.zeros_like(x), n=0x0000FF0F)
    takes_part = (0x0000FF0F >> LANES & 1) == 1
    assert (out == np.where(takes_part, LANES ^ 1, LANES)).all()


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FFFF, 0x80000001, 0x00F00000])
def test_votes_count_the_lanes_of_the_mask(minis, mask: int) -> None:
    rng = np.random.default_rng(mask)
    takes_part = (mask >> LANES & 1) == 1
    for x in (np.zeros(32), np.ones(32), *rng.integers(0, 2, (8, 32))):
        n = np.uint32(mask).astype(np.int32)
        out = minis.run("vote_kernel", x=x.astype(np.int32) * 4, out=np.zeros((32, 3), np.uint32), n=int(n))
        ballot = int(((x != 0) & takes_part) @ (1 << LANES.astype(np.int64)))
        want = [ballot, ballot != 0, ballot == mask]
        assert (out == np.where(takes_part[:, None], want, 0)).all()


def test_parts_of_a_warp_go_their_own_ways_and_meet_again(minis) -> None:
    x = np.random.default_rng(4).integers(-100, 100, 32).astype(np.float32)
    out = minis.run("parting_kernel", x=x, out=np.zeros_like(x))
    want = x.reshape(2, 16).sum(1).repeat(16)
    want[:3] += x[2]
    assert (out == want).all()


def test_every_thread_knows_its_place(minis) -> None:
    out = minis.run(
        "position_kernel",
        x=np.zeros(4, np.float32),
        out=np.zeros((2, 3, 5, 64, 4), np.uint32),
        grid=(5, 3, 2),
        threads=64,
    )
    z, y, x, thread = np.indices(out.shape[:-1])
    assert (out == np.stack([x, y, z, thread], -1)).all()


def _round(values: np.ndarray, name: str) -> np.ndarray:
    """Small integers as patterns of bfloat16 or float16."""
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_product_of_tiles_in_flight_is_the_plain_product(minis, dtype: str) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.integers(-8, 9, (64, 80)), rng.integers(-8, 9, (80, 96))
    out = minis.run(
        f"matmul_kernel<{dtype}>",
        x=_round(x, dtype),
        y=_round(y, dtype),
        out=np.full((64, 96), np.nan, np.float32),
        n=80,
        grid=(3, 2, 1),
        threads=128,
    )
    assert (out == x @ y).all()


def test_a_copy_that_is_not_kept_fills_with_zeros_and_reads_nothing(minis) -> None:
    x = np.random.default_rng(8).standard_normal((64, 4)).astype(np.float32)
    out = minis.run("fill_kernel", x=x, out=np.full_like(x, np.nan), n=0x2AAAAAA1)
    is_kept = np.tile(0x2AAAAAA1 >> LANES & 1, 2) == 1
    assert (out == np.where(is_kept[:, None], x, 0)).all()


def test_results_repeat_bit_by_bit(minis) -> None:
    x = np.random.default_rng(6).standard_normal((64, 1000)).astype(np.float32)
    outs = [
        minis.run("sum_kernel", x=x, out=np.zeros(64, np.float32), n=1000, grid=(64, 1, 1), threads=256)
        for _ in range(5)
    ]
    assert all((out == outs[0]).all() for out in outs)


def test_other_cpus_switch_stacks_to_the_same_results(minis, minis_with_ucontext) -> None:
    x = np.random.default_rng(7).standard_normal((8, 1000)).astype(np.float32)
    outs = [
        kernels.run("sum_kernel", x=x, out=np.zeros(8, np.float32), n=1000, grid=(8, 1, 1), threads=256)
        for kernels in (minis, minis_with_ucontext)
    ]
    assert (outs[0] == outs[1]).all()
    with pytest.raises(RuntimeError, match="shared memory race"):
        minis_with_ucontext.run(
            "race_in_warp", x=x, out=np.zeros(256, np.float32), is_broken=True, threads=64
        )
