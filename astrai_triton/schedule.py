"""Work maps of a ragged batch: prefix sums, q tile -> request, KV splits. Pure functions on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

Q_TILE = 64
"""Rows of Q per tile in the maps; a kernel with larger tiles may merge neighbours, never split one."""

_INT32_MAX = 2**31 - 1


def build_indptr(lens: npt.ArrayLike) -> Int32Array:
    """Prefix sum with a leading zero.

    Args:
        lens: ``[batch]`` non-negative lengths.

    Returns:
        ``[batch + 1]`` int32.

    Raises:
        ValueError: a length is negative, or the sum does not fit into int32.
    """
    lens_array = np.asarray(lens, dtype=np.int64)
    indptr = np.zeros(lens_array.size + 1, dtype=np.int64)
    np.add.accumulate(lens_array, out=indptr[1:])
    if lens_array.size and lens_array.min() < 0:
        raise ValueError(f"lens: wanted non-negative lengths, got {int(lens_array.min())}")
    if indptr[-1] > _INT32_MAX:
        raise ValueError(
            f"lens: wanted a sum of at most {_INT32_MAX}, got {int(indptr[-1])}; split the batch"
        )
    return indptr.astype(np.int32)


def build_q_tiles(q_lens: npt.ArrayLike, q_tile: int = Q_TILE) -> tuple[Int32Array, Int32Array]:
    """Map every q tile of a ragged batch to its request and to its index inside the request.

    ``q_lens=[70, 10, 130]`` with 64 rows a tile gives ``([0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2])``. A request
    without rows has no tile.

    Args:
        q_lens: ``[batch]`` non-negative row counts.
        q_tile: rows per tile, >= 1.

    Returns:
        ``q_tile_to_batch [tiles]`` and ``q_tile_to_index [tiles]``, int32.

    Raises:
        ValueError: ``q_tile`` is below 1 or a row count is negative.
    """
    if q_tile < 1:
        raise ValueError(f"q_tile: wanted >= 1, got {q_tile}")
    tiles_per_request = -(-np.asarray(q_lens, dtype=np.int64) // q_tile)
    if tiles_per_request.size and tiles_per_request.min() < 0:
        raise ValueError(f"q_lens: wanted non-negative row counts, got {q_lens!r}")
    q_tile_to_batch = np.repeat(np.arange(tiles_per_request.size, dtype=np.int32), tiles_per_request)
    first_tile = np.cumsum(tiles_per_request) - tiles_per_request
    q_tile_to_index = np.arange(q_tile_to_batch.size, dtype=np.int64) - first_tile[q_tile_to_batch]
    return q_tile_to_batch, q_tile_to_index.astype(np.int32)


def max_q_tiles(num_tokens: int, batch: int, q_tile: int = Q_TILE) -> int:
    """Largest number of tiles of any batch of at most ``batch`` requests and ``num_tokens`` rows in all."""
    # Every request but the longest gives one row to its own tile; the rest fill tiles.
    one_row_each = min(batch, num_tokens)
    return one_row_each + (num_tokens - one_row_each) // q_tile


def decode_chunk(q_heads: int, kv_heads: int, itemsize: int) -> int:
    """KV tokens per split of decode attention.

    A function of the shape alone, so that a request's bits do not depend on its batch mates. A split of C
    tokens reads ``2 * C * itemsize`` bytes of K and V per head element and writes and reads ``G`` float32
    partials, so ``C >= 128 * G / itemsize`` keeps the partials below 3.1 % of the traffic.

    Args:
        q_heads: query heads, a multiple of ``kv_heads``.
        kv_heads: key and value heads.
        itemsize: bytes per element of K and V.

    Returns:
        The smallest power of two that is at least 256 and at least ``128 * G / itemsize``.
    """
    wanted = max(256, -(-128 * q_heads // (kv_heads * itemsize)))
    return 1 << (wanted - 1).bit_length()


def num_decode_splits(max_len: int, chunk: int) -> int:
    """Splits that cover ``max_len`` KV tokens; at least one."""
    return max(1, -(-max_len // chunk))
