from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.schedule import (
    Q_TILE,
    build_indptr,
    build_q_tiles,
    decode_chunk,
    max_q_tiles,
    num_decode_splits,
)

LENS = st.lists(st.integers(0, 300), max_size=12)


@given(LENS)
def test_indptr_is_the_prefix_sum_with_a_leading_zero(lens: list[int]) -> None:
    indptr = build_indptr(lens)
    assert indptr.dtype == np.int32
    assert indptr.tolist() == [sum(lens[:n]) for n in range(len(lens) + 1)]


def test_indptr_of_no_request_is_a_single_zero() -> None:
    assert build_indptr([]).tolist() == [0]


def test_indptr_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="non-negative lengths, got -2"):
        build_indptr([3, -2])


def test_indptr_refuses_a_sum_beyond_int32() -> None:
    assert build_indptr([2**30, 2**30 - 1])[-1] == 2**31 - 1
    with pytest.raises(ValueError, match="got 2147483648"):
        build_indptr([2**30, 2**30])


def test_q_tiles_of_the_documented_example() -> None:
    q_tile_to_batch, q_tile_to_index = build_q_tiles([70, 10, 130])
    assert q_tile_to_batch.tolist() == [0, 0, 1, 2, 2, 2]
    assert q_tile_to_index.tolist() == [0, 1, 0, 0, 1, 2]


@given(LENS, st.integers(1, 100))
def test_q_tiles_cover_every_row_exactly_once_in_order(q_lens: list[int], q_tile: int) -> None:
    q_tile_to_batch, q_tile_to_index = build_q_tiles(q_lens, q_tile)
    assert q_tile_to_batch.dtype == q_tile_to_index.dtype == np.int32
    rows = [
        (batch, row)
        for batch, tile in zip(q_tile_to_batch.tolist(), q_tile_to_index.tolist(), strict=True)
        for row in range(tile * q_tile, min((tile + 1) * q_tile, q_lens[batch]))
    ]
    assert rows == [(batch, row) for batch, q_len in enumerate(q_lens) for row in range(q_len)]


@given(LENS, st.integers(1, 100))
def test_no_q_tile_is_empty(q_lens: list[int], q_tile: int) -> None:
    q_tile_to_batch, q_tile_to_index = build_q_tiles(q_lens, q_tile)
    assert all(
        tile * q_tile < q_lens[batch]
        for batch, tile in zip(q_tile_to_batch.tolist(), q_tile_to_index.tolist(), strict=True)
    )


def test_q_tiles_refuse_a_tile_without_rows() -> None:
    with pytest.raises(ValueError, match="q_tile: wanted >= 1, got 0"):
        build_q_tiles([1], 0)


def test_q_tiles_refuse_a_negative_row_count() -> None:
    with pytest.raises(ValueError, match="q_lens"):
        build_q_tiles([5, -200])


@given(LENS, st.integers(0, 50), st.integers(0, 3))
def test_max_q_tiles_bounds_every_batch(q_lens: list[int], more_tokens: int, more_requests: int) -> None:
    num_tiles = build_q_tiles(q_lens)[0].size
    assert num_tiles <= max_q_tiles(sum(q_lens) + more_tokens, len(q_lens) + more_requests)


def test_max_q_tiles_is_reached() -> None:
    q_lens = [1, 1, 1, 2 * Q_TILE + 1]
    assert build_q_tiles(q_lens)[0].size == max_q_tiles(sum(q_lens), len(q_lens)) == 6


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "itemsize", "chunk"),
    [(32, 8, 2, 256), (8, 1, 2, 512), (16, 16, 4, 256), (9, 3, 2, 256), (24, 3, 1, 1024), (20, 1, 2, 2048)],
)
def test_decode_chunk_of_known_shapes(q_heads: int, kv_heads: int, itemsize: int, chunk: int) -> None:
    assert decode_chunk(q_heads, kv_heads, itemsize) == chunk


@given(st.integers(1, 16), st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_decode_chunk_is_the_smallest_power_of_two_that_keeps_merge_traffic_low(
    kv_heads: int, group: int, itemsize: int
) -> None:
    chunk = decode_chunk(kv_heads * group, kv_heads, itemsize)
    assert chunk & (chunk - 1) == 0
    assert chunk >= 256
    assert chunk * itemsize >= 128 * group
    assert chunk == 256 or chunk // 2 * itemsize < 128 * group


def test_decode_splits_cover_the_context_and_are_never_none() -> None:
    assert [num_decode_splits(n, 256) for n in (0, 1, 256, 257, 4096)] == [1, 1, 1, 2, 16]
