"""What a launch accepts, and which of several failing blocks it reports."""

from __future__ import annotations

import numpy as np
import pytest


def _run(minis, kernel: str = "position_kernel", **options) -> np.ndarray:
    call = {"x": np.zeros(256, np.float32), "out": np.zeros(4096, np.uint32), "threads": 64}
    return minis.run(kernel, **{**call, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads of a block: wanted 1 to 1024, got 0"),
        ({"threads": 1025}, "threads of a block: wanted 1 to 1024, got 1025"),
        ({"shared_bytes": 227 * 1024 + 1}, ".*wanted 0 to 232448 bytes, got 232449"),
        ({"shared_bytes": -1}, ".*wanted 0 to 232448 bytes, got -1"),
        ({"grid": (1, 65536, 1)}, r"grid: wanted at most .*, got \(1, 65536, 1\)"),
        ({"grid": (1, 1, 65536)}, r"grid: wanted at most .*, got \(1, 1, 65536\)"),
        ({"grid": (2**31, 1, 1)}, r"grid: wanted at most .*, got \(2147483648, 1, 1\)"),
    ],
)
def test_a_launch_beyond_the_limits_is_refused(minis, options, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"launch refused: kernel position_kernel: {words}"):
        _run(minis, **options)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 65536, 1)])
def test_an_empty_grid_runs_nothing(minis, grid: tuple[int, int, int]) -> None:
    out = _run(minis, out=np.full(4096, 7, np.uint32), grid=grid)
    assert (out == 7).all()


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 1000, 1024])
def test_a_block_may_have_any_number_of_threads(minis, threads: int) -> None:
    out = _run(minis, threads=threads).reshape(1024, 4)
    assert (out[:threads, 3] == np.arange(threads)).all()
    assert (out[threads:] == 0).all()


def test_the_largest_shared_memory_is_accepted(minis) -> None:
    _run(minis, shared_bytes=227 * 1024)


def test_of_many_failing_blocks_the_first_is_reported(minis) -> None:
    # Blocks of 256 threads sum 256 elements each; x has enough for five of them.
    x = np.zeros(5 * 256, np.float32)
    for _ in range(10):
        with pytest.raises(RuntimeError, match=r"out of bounds: kernel sum_kernel, block \(5, 0, 0\)"):
            minis.run("sum_kernel", x=x, out=np.zeros(500, np.float32), n=256, grid=(500, 1, 1), threads=256)
