from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from astrai_triton.cache import KVStorage, ReqToTokenPool
from astrai_triton.errors import CacheError


def upload(pool: ReqToTokenPool) -> None:
    """Bring pending updates to the device as a bind does."""
    index, slots = pool.take_updates()
    pool.apply_updates(torch.from_numpy(index), torch.from_numpy(slots))


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_storage_has_the_documented_shape_and_is_zero() -> None:
    storage = KVStorage(10, 3, 2, 4, dtype=torch.float16)
    for buffer in (storage.k_buffer, storage.v_buffer):
        assert buffer.shape == (3, 10, 2, 4)
        assert buffer.dtype == torch.float16
        assert not buffer.any()
    assert storage.k_buffer.data_ptr() != storage.v_buffer.data_ptr()


def test_storage_knows_its_bytes() -> None:
    storage = KVStorage(10, 3, 2, 4, dtype=torch.bfloat16)
    assert storage.num_bytes == storage.k_buffer.nbytes + storage.v_buffer.nbytes == 960


@pytest.mark.parametrize("size", [0, -1, 2**31])
def test_storage_refuses_a_size_that_slots_cannot_name(size: int) -> None:
    with pytest.raises(ValueError, match=f"size: wanted 1 to 2147483647 slots, got {size}"):
        KVStorage(size, 1, 1, 1)


@pytest.mark.parametrize("name", ["n_layers", "n_kv_heads", "head_dim"])
def test_storage_refuses_an_empty_dimension(name: str) -> None:
    sizes: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: wanted >= 1, got 0"):
        KVStorage(4, **sizes)


def test_an_absurd_storage_is_refused_with_its_size_and_the_way_out() -> None:
    with pytest.raises(CacheError, match=r"n_tokens=2000000000 needs \d+ bytes .* lower n_tokens"):
        KVStorage(2_000_000_000, 1000, 64, 256)


def test_a_storage_that_the_device_refuses_is_reported_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CacheError, match=r"n_tokens=16 needs 128 bytes .* which cpu refused") as caught:
        KVStorage(16, 1, 1, 1)
    assert str(caught.value.__cause__) == "out of memory"


def test_on_a_cpu_the_tensor_is_the_table() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(1, 1, slots(7, 8))
    assert pool.req_to_token.tolist() == [[-1] * 4, [-1, 7, 8, -1]]
    assert pool.req_to_token.data_ptr() == pool.table.ctypes.data
    assert pool.take_updates()[0].size == 0


def test_writes_beyond_the_end_of_a_row_are_left_out() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(0, 2, slots(1, 2, 3))
    assert pool.table.tolist() == [[-1, -1, 1, 2], [-1] * 4]


def test_a_cleared_row_is_masked() -> None:
    for staged in (False, True):
        pool = ReqToTokenPool(2, 3, staged=staged)
        pool.write(0, 0, slots(1, 2, 3))
        pool.write(1, 0, slots(4, 5, 6))
        upload(pool)
        pool.clear(0)
        assert pool.req_to_token.tolist() == [[-1, -1, -1], [4, 5, 6]]
        pool.check()


def test_a_linear_table_counts_slots() -> None:
    for staged in (False, True):
        pool = ReqToTokenPool(2, 3, staged=staged)
        pool.fill_linear()
        assert pool.req_to_token.tolist() == [[0, 1, 2], [3, 4, 5]]
        pool.check()


def test_a_staged_table_reaches_the_device_with_its_updates() -> None:
    pool = ReqToTokenPool(3, 4, staged=True)
    pool.write(0, 0, slots(1, 2))
    pool.write(0, 2, slots(3))
    pool.write(2, 1, slots(9))
    assert (pool.req_to_token == -1).all()
    index, values = pool.take_updates()
    assert dict(zip(index.tolist(), values.tolist(), strict=True)) == {0: 1, 1: 2, 2: 3, 9: 9}
    pool.apply_updates(torch.from_numpy(index), torch.from_numpy(values))
    assert pool.req_to_token.tolist() == pool.table.tolist()
    assert pool.take_updates()[0].size == 0


def test_a_staged_table_hands_over_the_last_value_of_a_position() -> None:
    pool = ReqToTokenPool(1, 4, staged=True)
    pool.write(0, 0, slots(1, 2))
    pool.write(0, 0, slots(5))
    upload(pool)
    assert pool.req_to_token.tolist() == [[5, 2, -1, -1]]


def test_updates_of_a_row_that_was_cleared_are_forgotten() -> None:
    pool = ReqToTokenPool(1, 4, staged=True)
    pool.write(0, 0, slots(1, 2))
    pool.clear(0)
    assert pool.take_updates()[0].size == 0


def test_check_finds_a_device_table_that_differs() -> None:
    pool = ReqToTokenPool(2, 4, staged=True)
    pool.req_to_token[1, 2] = 5
    with pytest.raises(AssertionError, match="row 1 differs from the host's at positions"):
        pool.check()


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_an_empty_table_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="num_reqs, max_ctx_len: wanted >= 1"):
        ReqToTokenPool(*sizes)


def test_a_table_beyond_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="lower max_batch_size or max_seq_len"):
        ReqToTokenPool(2**16, 2**15)
