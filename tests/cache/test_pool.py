from __future__ import annotations

import pytest
import torch

from astrai_triton.cache import KVStorage
from astrai_triton.errors import CacheError, OutOfPagesError, PageOwnershipError
from pools import CHAIN, lookup, make_pool, run, take


def test_opening_takes_no_new_pages() -> None:
    pool = make_pool()
    lease = pool.open(list(range(30)))
    assert lease is not None
    assert (lease.num_slots, pool.stats().owned) == (0, 0)
    assert pool.pages_needed(lease, 30) == 8


def test_open_gives_none_when_all_rows_are_taken() -> None:
    pool = make_pool(max_batch_size=2)
    leases = [take(pool, [1]), take(pool, [2])]
    assert pool.open([3]) is None
    pool.close(leases[0])
    again = pool.open([3])
    assert again is not None
    assert again.row == 0


@pytest.mark.parametrize("prompt_len", [0, 65])
def test_prompts_without_room_are_refused(prompt_len: int) -> None:
    with pytest.raises(ValueError, match=f"prompt_ids: wanted 1 to max_seq_len=64 tokens, got {prompt_len}"):
        make_pool().open([1] * prompt_len)


def test_extending_within_the_last_page_takes_nothing() -> None:
    pool = make_pool()
    lease = take(pool, [1])
    assert (lease.num_slots, pool.pages_needed(lease, 4), pool.pages_needed(lease, 5)) == (4, 0, 1)
    pool.extend(lease, 4)
    pool.extend(lease, 2)
    assert len(lease.pages) == 1


def test_slots_end_with_the_context_where_pages_do_not() -> None:
    pool = make_pool(max_seq_len=10)
    lease = take(pool, list(range(10)))
    assert (lease.num_slots, len(lease.pages)) == (10, 3)
    pool.check()
    with pytest.raises(ValueError, match="num_tokens: wanted at most max_seq_len=10, got 11"):
        pool.extend(lease, 11)


def test_running_out_of_pages_changes_nothing() -> None:
    pool = make_pool(n_tokens=16)
    run(pool, [7] * 5)
    lease = take(pool, [1] * 9)
    before, pages = pool.stats(), list(lease.pages)
    with pytest.raises(OutOfPagesError, match="wanted 2 pages, 1 are free or evictable"):
        pool.extend(lease, 17)
    assert (pool.stats(), lease.pages, lease.num_slots) == (before, pages, 12)
    pool.check()
    pool.extend(lease, 16)
    assert pool.stats().evicted_pages == 1


def test_closing_twice_raises() -> None:
    pool = make_pool()
    lease = take(pool, [1, 2])
    pool.close(lease)
    with pytest.raises(PageOwnershipError, match="closed before"):
        pool.close(lease)
    pool.check()


def test_a_closed_lease_cannot_be_used() -> None:
    pool = make_pool()
    lease = take(pool, [1, 2])
    pool.close(lease)
    with pytest.raises(PageOwnershipError):
        pool.extend(lease, 1)
    with pytest.raises(PageOwnershipError):
        pool.record(lease, [1])
    for q_len, kv_len in ((1, 1), (0, 0), (1, 0)):
        with pytest.raises(PageOwnershipError):
            pool.bind_tasks([lease], [q_len], [kv_len])


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5), (2, 1), (-1, 2)])
def test_lengths_that_do_not_fit_are_refused(q_len: int, kv_len: int) -> None:
    pool = make_pool()
    lease = take(pool, [1])
    with pytest.raises(ValueError, match=f"for row 0, got {q_len} and {kv_len}"):
        pool.bind_tasks([lease], [q_len], [kv_len])


def test_one_length_per_lease_is_wanted() -> None:
    pool = make_pool()
    lease = take(pool, [1])
    with pytest.raises(ValueError, match="wanted one length, got 1, 1, 2"):
        pool.bind_tasks([lease], [1], [1, 1])


def test_only_tokens_with_slots_can_be_recorded() -> None:
    pool = make_pool()
    lease = take(pool, [1] * 4)
    with pytest.raises(ValueError, match="token_ids: wanted at most 4"):
        pool.record(lease, [1] * 8)


def test_contiguous_mode_maps_positions_linearly() -> None:
    pool = make_pool(n_tokens=None, max_batch_size=3, max_seq_len=10)
    assert pool.storage.size == 30
    leases = [take(pool, [1] * 4) for _ in range(3)]
    cache = pool.bind_tasks(leases, [4, 2, 1], [4, 4, 10])
    assert cache.out_cache_loc.tolist() == [0, 1, 2, 3, 12, 13, 29]
    assert cache.req_to_token.flatten().tolist() == list(range(30))
    pool.check()


def test_contiguous_mode_shares_nothing_and_counts_rows() -> None:
    pool = make_pool(n_tokens=None, max_batch_size=2)
    lease = take(pool, CHAIN)
    pool.record(lease, CHAIN)
    assert pool.pages_needed(lease, 64) == 0
    stats = pool.stats()
    assert (stats.total, stats.free, stats.owned, stats.cached) == (2, 1, 1, 0)
    pool.close(lease)
    pool.reset_prefixes()
    pool.check()
    assert pool.num_free_pages() == 2
    assert lookup(pool, CHAIN) == 0


def test_contiguous_mode_ends_with_the_context() -> None:
    pool = make_pool(n_tokens=None)
    lease = take(pool, [1])
    pool.extend(lease, 64)
    with pytest.raises(ValueError, match="max_seq_len=64, got 65"):
        pool.extend(lease, 65)


def test_capacity_is_the_smaller_of_context_and_pool() -> None:
    assert make_pool(n_tokens=32).capacity_tokens == 32
    assert make_pool(n_tokens=128).capacity_tokens == 64
    assert make_pool(n_tokens=None).capacity_tokens == 64


def test_one_lease_can_hold_the_whole_capacity() -> None:
    pool = make_pool(n_tokens=32)
    run(pool, [3] * 32)
    pool.extend(take(pool, [1]), pool.capacity_tokens)
    pool.check()


@pytest.mark.parametrize("n_tokens", [0, -4, 30])
def test_n_tokens_must_be_a_multiple_of_the_page_size(n_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"n_tokens: wanted a positive multiple of page_size=4, got {n_tokens}"
    ):
        make_pool(n_tokens=n_tokens)


@pytest.mark.parametrize(
    "name",
    [
        "n_layers",
        "n_q_heads",
        "n_kv_heads",
        "head_dim",
        "max_batch_size",
        "max_seq_len",
        "max_step_tokens",
        "page_size",
    ],
)
def test_sizes_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*wanted"):
        make_pool(**{name: 0})


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(CacheError, match=r"n_tokens=1600000000 needs \d+ bytes"):
        make_pool(n_tokens=1_600_000_000, n_layers=64, n_kv_heads=8, n_q_heads=8, head_dim=128)


def test_a_bind_shows_the_pool_s_own_buffers() -> None:
    pool = make_pool(dtype=torch.float16)
    cache = pool.bind_tasks([take(pool, [1, 2])], [2], [2])
    assert isinstance(pool.storage, KVStorage)
    assert cache.k_buffer is pool.storage.k_buffer
    assert cache.v_buffer is pool.storage.v_buffer
    assert cache.k_buffer.dtype == cache.decode_out.dtype == torch.float16


def test_a_padded_bind_checks_leases_like_any_other() -> None:
    pool = make_pool()
    lease = take(pool, [1, 2, 3])
    pool.bind_padded([lease], [3], 4)
    assert pool.view_padded(4).seq_lens.tolist() == [3, 0, 0, 0]
    with pytest.raises(ValueError, match="extend the lease first"):
        pool.bind_padded([lease], [9], 4)
    with pytest.raises(ValueError, match="wanted one length, got 1, 1, 2"):
        pool.bind_padded([lease], [3, 3], 4)
    pool.extend(lease, 4)
    pool.record(lease, [1, 2, 3, 4])
    with pytest.raises(PageOwnershipError, match="recorded and may be shared"):
        pool.bind_padded([lease], [4], 4)
