from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from astrai_triton.cache import KVStorage, Lease, PagePool
from astrai_triton.errors import CacheError, OutOfPagesError, PageOwnershipError


def make(**sizes: Any) -> PagePool:
    defaults = {"max_batch_size": 8, "max_seq_len": 64, "max_step_tokens": 64, "page_size": 4, "n_tokens": 64}
    heads = {"n_layers": 1, "n_q_heads": 2, "n_kv_heads": 1, "head_dim": 2}
    return PagePool(**(heads | defaults | sizes))


def take(pool: PagePool, prompt: Sequence[int], salt: str | None = None) -> Lease:
    """Open a lease with slots for its whole prompt."""
    lease = pool.open(prompt, salt)
    assert lease is not None
    pool.extend(lease, len(prompt))
    return lease


def run(pool: PagePool, prompt: Sequence[int], salt: str | None = None) -> int:
    """Let a task come and go; returns how many tokens it found cached."""
    lease = take(pool, prompt, salt)
    pool.record(lease, prompt)
    pool.close(lease)
    pool.check()
    return lease.cached_len


def lookup(pool: PagePool, prefix: Sequence[int], salt: str | None = None) -> int:
    """How many tokens of ``prefix`` a longer prompt would find."""
    lease = pool.open([*prefix, 999], salt)
    assert lease is not None
    pool.close(lease)
    pool.check()
    return lease.cached_len


CHAIN = list(range(16))


def test_leaves_go_first_so_the_leading_pages_still_hit() -> None:
    pool = make(n_tokens=16)
    run(pool, CHAIN)
    foreign = take(pool, [100])
    assert pool.stats().evicted_pages == 1
    assert lookup(pool, CHAIN) == 12
    pool.close(foreign)


def test_running_a_prefix_keeps_the_longer_chain() -> None:
    pool = make(n_tokens=20)
    run(pool, CHAIN)
    assert run(pool, CHAIN[:8]) == 4
    assert lookup(pool, CHAIN) == 16


def test_a_full_hit_in_a_full_pool_gives_up_only_the_leaf() -> None:
    pool = make(n_tokens=16)
    run(pool, CHAIN)
    assert run(pool, CHAIN) == 12
    assert lookup(pool, CHAIN) == 16


def test_a_branch_stays_when_its_sibling_ends() -> None:
    pool = make()
    shared, tail_a, tail_b = list(range(8)), [50] * 8, [60] * 8
    a, b = take(pool, shared + tail_a), take(pool, shared + tail_b)
    pool.record(a, shared + tail_a)
    pool.record(b, shared + tail_b)
    assert a.pages[:2] == b.pages[:2]
    pool.close(b)
    pool.check()
    assert lookup(pool, shared + tail_a) == 16
    assert lookup(pool, shared + tail_b) == 16
    pool.close(a)


def test_a_full_hit_is_recomputed_into_a_private_page() -> None:
    pool = make()
    prompt = list(range(8))
    first = take(pool, prompt)
    pool.record(first, prompt)
    second = take(pool, prompt)
    assert second.cached_len == 4
    cache = pool.bind_tasks([second], [4], [8])
    written_pages = {slot // 4 for slot in cache.out_cache_loc.tolist()}
    assert not written_pages & set(first.pages)
    pool.check()


def test_recording_an_equal_page_goes_over_to_the_cached_one_and_frees_its_own() -> None:
    pool = make()
    prompt = list(range(8))
    first, second = take(pool, prompt), take(pool, prompt)
    pool.record(first, prompt)
    free = pool.stats().free
    pool.record(second, prompt)
    pool.check()
    assert second.pages == first.pages
    assert pool.stats().free == free + 2
    assert pool.bind_tasks([second], [0], [8]).req_to_token[second.row, :8].tolist() == [
        page * 4 + i for page in first.pages for i in range(4)
    ]


def test_eight_identical_prompts_at_once() -> None:
    pool = make(n_tokens=128)
    prompt = list(range(10))
    leases = [take(pool, prompt) for _ in range(8)]
    assert [lease.cached_len for lease in leases] == [0] * 8
    for lease in leases:
        pool.record(lease, prompt)
        pool.check()
    # Two full pages once, and eight private partial ones.
    assert pool.stats().owned == 2 + 8
    for lease in leases:
        pool.close(lease)
        pool.check()
    assert (pool.stats().owned, pool.stats().cached) == (0, 2)
    assert run(pool, prompt) == 8


def test_equal_prompts_under_different_salts_share_nothing() -> None:
    pool = make()
    prompt = list(range(9))
    run(pool, prompt, "a")
    assert lookup(pool, prompt[:8], "b") == 0
    assert lookup(pool, prompt[:8]) == 0
    assert lookup(pool, prompt[:8], "a") == 8
    a, b = take(pool, prompt, "a"), take(pool, prompt, "b")
    pool.record(b, prompt)
    assert not set(a.pages) & set(b.pages)
    pool.check()


class CountingTokens(list[int]):
    """A list that counts the tokens that are read from it."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("num_tokens", [4096, 32768])
def test_recording_and_finding_a_prompt_reads_each_token_once(num_tokens: int) -> None:
    pool = make(n_tokens=num_tokens, max_seq_len=num_tokens, page_size=16, max_batch_size=1)
    tokens = CountingTokens(range(num_tokens))
    lease = take(pool, tokens)
    assert tokens.num_read <= 16
    tokens.num_read = 0
    pool.record(lease, tokens)
    assert tokens.num_read == num_tokens
    pool.close(lease)
    tokens.num_read = 0
    again = pool.open(tokens)
    assert again is not None
    assert again.cached_len == num_tokens - 16
    assert tokens.num_read <= num_tokens


def test_recording_step_by_step_reads_only_the_new_page() -> None:
    pool = make(page_size=4, n_tokens=64)
    tokens = CountingTokens(range(40))
    lease = take(pool, tokens)
    for end in (12, 13, 14, 15):
        pool.record(lease, CountingTokens(range(end)))
    del tokens[16:]
    tokens.num_read = 0
    pool.record(lease, tokens)
    pool.record(lease, tokens)
    assert tokens.num_read == 4


def test_opening_takes_no_new_pages() -> None:
    pool = make()
    lease = pool.open(list(range(30)))
    assert lease is not None
    assert (lease.num_slots, pool.stats().owned) == (0, 0)
    assert pool.pages_needed(lease, 30) == 8


def test_open_gives_none_when_all_rows_are_taken() -> None:
    pool = make(max_batch_size=2)
    leases = [take(pool, [1]), take(pool, [2])]
    assert pool.open([3]) is None
    pool.close(leases[0])
    again = pool.open([3])
    assert again is not None
    assert again.row == 0


@pytest.mark.parametrize("prompt_len", [0, 65])
def test_prompts_without_room_are_refused(prompt_len: int) -> None:
    with pytest.raises(ValueError, match=f"prompt_ids: wanted 1 to max_seq_len=64 tokens, got {prompt_len}"):
        make().open([1] * prompt_len)


def test_a_prompt_of_the_whole_context_is_served_cold_and_warm() -> None:
    pool = make(max_seq_len=16, n_tokens=32)
    assert run(pool, CHAIN) == 0
    assert run(pool, CHAIN) == 12


def test_extending_within_the_last_page_takes_nothing() -> None:
    pool = make()
    lease = take(pool, [1])
    assert (lease.num_slots, pool.pages_needed(lease, 4), pool.pages_needed(lease, 5)) == (4, 0, 1)
    pool.extend(lease, 4)
    pool.extend(lease, 2)
    assert len(lease.pages) == 1


def test_slots_end_with_the_context_where_pages_do_not() -> None:
    pool = make(max_seq_len=10)
    lease = take(pool, list(range(10)))
    assert (lease.num_slots, len(lease.pages)) == (10, 3)
    pool.check()
    with pytest.raises(ValueError, match="num_tokens: wanted at most max_seq_len=10, got 11"):
        pool.extend(lease, 11)


def test_running_out_of_pages_changes_nothing() -> None:
    pool = make(n_tokens=16)
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
    pool = make()
    lease = take(pool, [1, 2])
    pool.close(lease)
    with pytest.raises(PageOwnershipError, match="closed before"):
        pool.close(lease)
    pool.check()


def test_a_closed_lease_cannot_be_used() -> None:
    pool = make()
    lease = take(pool, [1, 2])
    pool.close(lease)
    with pytest.raises(PageOwnershipError):
        pool.extend(lease, 1)
    with pytest.raises(PageOwnershipError):
        pool.record(lease, [1])
    for q_len, kv_len in ((1, 1), (0, 0), (1, 0)):
        with pytest.raises(PageOwnershipError):
            pool.bind_tasks([lease], [q_len], [kv_len])


def test_a_step_must_not_write_to_recorded_pages() -> None:
    pool = make()
    lease = take(pool, list(range(12)))
    pool.record(lease, list(range(9)))
    with pytest.raises(
        PageOwnershipError, match="from position 7 on, but its first 8 positions are recorded"
    ):
        pool.bind_tasks([lease], [2], [9])
    pool.bind_tasks([lease], [1], [9])
    pool.bind_tasks([lease], [0], [3])


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5), (2, 1), (-1, 2)])
def test_lengths_that_do_not_fit_are_refused(q_len: int, kv_len: int) -> None:
    pool = make()
    lease = take(pool, [1])
    with pytest.raises(ValueError, match=f"for row 0, got {q_len} and {kv_len}"):
        pool.bind_tasks([lease], [q_len], [kv_len])


def test_one_length_per_lease_is_wanted() -> None:
    pool = make()
    lease = take(pool, [1])
    with pytest.raises(ValueError, match="wanted one length, got 1, 1, 2"):
        pool.bind_tasks([lease], [1], [1, 1])


def test_only_tokens_with_slots_can_be_recorded() -> None:
    pool = make()
    lease = take(pool, [1] * 4)
    with pytest.raises(ValueError, match="token_ids: wanted at most 4"):
        pool.record(lease, [1] * 8)


def test_a_partial_page_stays_private_and_is_freed() -> None:
    pool = make()
    run(pool, list(range(7)))
    assert (pool.stats().cached, pool.stats().free) == (1, 15)


def test_resetting_forgets_what_nobody_holds() -> None:
    pool = make()
    run(pool, CHAIN)
    holder = take(pool, [*CHAIN[:8], 5])
    pool.reset_prefixes()
    pool.check()
    assert pool.stats().evicted_pages == 0
    assert lookup(pool, CHAIN) == 8
    pool.close(holder)
    pool.reset_prefixes()
    assert pool.stats().free == pool.stats().total == 16


def test_stats_count_the_lookups_of_tasks_that_took_pages() -> None:
    pool = make()
    run(pool, CHAIN)
    refused = pool.open([*CHAIN, 1])
    assert refused is not None
    pool.close(refused)
    assert (pool.stats().hits_tokens, pool.stats().lookup_tokens) == (0, 16)
    lease = take(pool, [*CHAIN, 1, 2])
    pool.extend(lease, 30)
    assert (pool.stats().hits_tokens, pool.stats().lookup_tokens) == (16, 34)


def test_cached_pages_count_as_free_for_admission() -> None:
    pool = make()
    run(pool, CHAIN)
    assert pool.stats().cached == 4
    assert pool.num_free_pages() == 16


@pytest.mark.parametrize("options", [{"page_size": 1}, {"prefix_cache": False}])
def test_without_prefix_sharing_nothing_is_cached(options: dict[str, Any]) -> None:
    pool = make(**options)
    assert run(pool, CHAIN) == 0
    assert run(pool, CHAIN) == 0
    assert pool.stats().free == pool.stats().total
    assert pool.stats().lookup_tokens == 0


def test_contiguous_mode_maps_positions_linearly() -> None:
    pool = make(n_tokens=None, max_batch_size=3, max_seq_len=10)
    assert pool.storage.size == 30
    leases = [take(pool, [1] * 4) for _ in range(3)]
    cache = pool.bind_tasks(leases, [4, 2, 1], [4, 4, 10])
    assert cache.out_cache_loc.tolist() == [0, 1, 2, 3, 12, 13, 29]
    assert cache.req_to_token.flatten().tolist() == list(range(30))
    pool.check()


def test_contiguous_mode_shares_nothing_and_counts_rows() -> None:
    pool = make(n_tokens=None, max_batch_size=2)
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
    pool = make(n_tokens=None)
    lease = take(pool, [1])
    pool.extend(lease, 64)
    with pytest.raises(ValueError, match="max_seq_len=64, got 65"):
        pool.extend(lease, 65)


def test_capacity_is_the_smaller_of_context_and_pool() -> None:
    assert make(n_tokens=32).capacity_tokens == 32
    assert make(n_tokens=128).capacity_tokens == 64
    assert make(n_tokens=None).capacity_tokens == 64


def test_one_lease_can_hold_the_whole_capacity() -> None:
    pool = make(n_tokens=32)
    run(pool, [3] * 32)
    pool.extend(take(pool, [1]), pool.capacity_tokens)
    pool.check()


@pytest.mark.parametrize("n_tokens", [0, -4, 30])
def test_n_tokens_must_be_a_multiple_of_the_page_size(n_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"n_tokens: wanted a positive multiple of page_size=4, got {n_tokens}"
    ):
        make(n_tokens=n_tokens)


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
        make(**{name: 0})


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(CacheError, match=r"n_tokens=1600000000 needs \d+ bytes"):
        make(n_tokens=1_600_000_000, n_layers=64, n_kv_heads=8, n_q_heads=8, head_dim=128)


def test_a_bind_shows_the_pool_s_own_buffers() -> None:
    pool = make(dtype=torch.float16)
    cache = pool.bind_tasks([take(pool, [1, 2])], [2], [2])
    assert isinstance(pool.storage, KVStorage)
    assert cache.k_buffer is pool.storage.k_buffer
    assert cache.v_buffer is pool.storage.v_buffer
    assert cache.k_buffer.dtype == cache.decode_out.dtype == torch.float16


def test_a_fault_while_recording_leaves_the_lease_consistent() -> None:
    pool = make()
    lease = take(pool, CHAIN)
    broken: list[Any] = [*CHAIN[:5], [], *CHAIN[6:]]
    with pytest.raises(TypeError):
        pool.record(lease, broken)
    pool.check()
    assert lease.num_recorded == 1
    pool.record(lease, CHAIN)
    pool.close(lease)
    assert lookup(pool, CHAIN) == 16
