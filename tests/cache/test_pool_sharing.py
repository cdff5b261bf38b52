"""Prefix sharing through the pool."""

from __future__ import annotations

from typing import Any

import pytest

from astrai_triton.errors import PageOwnershipError
from pools import CHAIN, lookup, make_pool, run, take


def test_leaves_go_first_so_the_leading_pages_still_hit() -> None:
    pool = make_pool(n_tokens=16)
    run(pool, CHAIN)
    foreign = take(pool, [100])
    assert pool.stats().evicted_pages == 1
    assert lookup(pool, CHAIN) == 12
    pool.close(foreign)


def test_running_a_prefix_keeps_the_longer_chain() -> None:
    pool = make_pool(n_tokens=20)
    run(pool, CHAIN)
    assert run(pool, CHAIN[:8]) == 4
    assert lookup(pool, CHAIN) == 16


def test_a_full_hit_in_a_full_pool_gives_up_only_the_leaf() -> None:
    pool = make_pool(n_tokens=16)
    run(pool, CHAIN)
    assert run(pool, CHAIN) == 12
    assert lookup(pool, CHAIN) == 16


def test_a_branch_stays_when_its_sibling_ends() -> None:
    pool = make_pool()
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
    pool = make_pool()
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
    pool = make_pool()
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
    pool = make_pool(n_tokens=128)
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
    pool = make_pool()
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
    pool = make_pool(n_tokens=num_tokens, max_seq_len=num_tokens, page_size=16, max_batch_size=1)
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
    pool = make_pool(page_size=4, n_tokens=64)
    tokens = CountingTokens(range(40))
    lease = take(pool, tokens)
    for end in (12, 13, 14, 15):
        pool.record(lease, CountingTokens(range(end)))
    del tokens[16:]
    tokens.num_read = 0
    pool.record(lease, tokens)
    pool.record(lease, tokens)
    assert tokens.num_read == 4


def test_a_prompt_of_the_whole_context_is_served_cold_and_warm() -> None:
    pool = make_pool(max_seq_len=16, n_tokens=32)
    assert run(pool, CHAIN) == 0
    assert run(pool, CHAIN) == 12


def test_a_step_must_not_write_to_recorded_pages() -> None:
    pool = make_pool()
    lease = take(pool, list(range(12)))
    pool.record(lease, list(range(9)))
    with pytest.raises(
        PageOwnershipError, match="from position 7 on, but its first 8 positions are recorded"
    ):
        pool.bind_tasks([lease], [2], [9])
    pool.bind_tasks([lease], [1], [9])
    pool.bind_tasks([lease], [0], [3])


def test_a_partial_page_stays_private_and_is_freed() -> None:
    pool = make_pool()
    run(pool, list(range(7)))
    assert (pool.stats().cached, pool.stats().free) == (1, 15)


def test_resetting_forgets_what_nobody_holds() -> None:
    pool = make_pool()
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
    pool = make_pool()
    run(pool, CHAIN)
    refused = pool.open([*CHAIN, 1])
    assert refused is not None
    pool.close(refused)
    assert (pool.stats().hits_tokens, pool.stats().lookup_tokens) == (0, 16)
    lease = take(pool, [*CHAIN, 1, 2])
    pool.extend(lease, 30)
    assert (pool.stats().hits_tokens, pool.stats().lookup_tokens) == (16, 34)


def test_cached_pages_count_as_free_for_admission() -> None:
    pool = make_pool()
    run(pool, CHAIN)
    assert pool.stats().cached == 4
    assert pool.num_free_pages() == 16


@pytest.mark.parametrize("options", [{"page_size": 1}, {"prefix_cache": False}])
def test_without_prefix_sharing_nothing_is_cached(options: dict[str, Any]) -> None:
    pool = make_pool(**options)
    assert run(pool, CHAIN) == 0
    assert run(pool, CHAIN) == 0
    assert pool.stats().free == pool.stats().total
    assert pool.stats().lookup_tokens == 0


def test_a_fault_while_recording_leaves_the_lease_consistent() -> None:
    pool = make_pool()
    lease = take(pool, CHAIN)
    broken: list[Any] = [*CHAIN[:5], [], *CHAIN[6:]]
    with pytest.raises(TypeError):
        pool.record(lease, broken)
    pool.check()
    assert lease.num_recorded == 1
    pool.record(lease, CHAIN)
    pool.close(lease)
    assert lookup(pool, CHAIN) == 16
