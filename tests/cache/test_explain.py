"""What a prompt would find in the prefix cache, and where it parts from what is there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.cache import PrefixReport, RadixCache, explain_prefix
from astrai_triton.cache import radix as radix_module
from astrai_triton.cache.explain import Difference
from pools import CHAIN, make_pool, run


def explain(prompt: list[int], *recorded: list[int], salt: str | None = None) -> PrefixReport:
    """Pages of 4 tokens; ``recorded`` has been in the pool before, under no salt."""
    pool = make_pool()
    for other in recorded:
        run(pool, other)
    return explain_prefix(pool.radix, pool.page_size, prompt, salt)


def states(report: PrefixReport) -> list[str]:
    return [page.state for page in report.pages]


def test_nothing_is_found_in_an_empty_cache() -> None:
    report = explain(CHAIN[:6])
    assert (report.is_on, report.cached_tokens, report.agreeing_tokens) == (True, 0, 0)
    assert states(report) == ["missing", "partial"]
    assert report.difference is None


def test_found_pages_have_the_name_of_their_prefix() -> None:
    pool = make_pool()
    run(pool, CHAIN)
    report = explain_prefix(pool.radix, 4, [*CHAIN[:8], 99])
    assert pool.radix is not None
    assert [page.digest for page in report.pages] == [
        *(pool.radix.digest(node) for node in pool.radix.match(CHAIN[:8])),
        None,
    ]


def test_the_page_with_the_last_token_is_computed_anew() -> None:
    report = explain(CHAIN[:8], CHAIN)
    assert states(report) == ["hit", "recomputed"]
    assert (report.cached_tokens, report.agreeing_tokens, report.difference) == (4, 8, None)


def test_the_first_token_that_differs_is_named_with_the_one_in_the_cache() -> None:
    report = explain([*CHAIN[:6], 77, 78, 79], CHAIN)
    assert states(report) == ["hit", "missing", "partial"]
    assert (report.cached_tokens, report.agreeing_tokens) == (4, 6)
    assert report.difference == Difference(position=6, asked=77, cached=6)


def test_a_prompt_that_ends_inside_a_cached_page_does_not_differ() -> None:
    report = explain(CHAIN[:6], CHAIN)
    assert states(report) == ["hit", "partial"]
    assert (report.agreeing_tokens, report.difference) == (6, None)


def test_of_several_continuations_the_nearest_is_compared() -> None:
    report = explain([0, 1, 2, 9, 5], [0, 7, 7, 7, 7], [0, 1, 2, 3, 4], [0, 1, 8, 8, 8])
    assert report.difference == Difference(position=3, asked=9, cached=3)


def test_what_other_tenants_have_cached_is_not_told() -> None:
    report = explain([0, 1, 2, 9, 5], [0, 1, 2, 3, 4], salt="other")
    assert (report.cached_tokens, report.agreeing_tokens, report.difference) == (0, 0, None)


def test_a_salted_prompt_is_compared_within_its_salt() -> None:
    pool = make_pool()
    run(pool, CHAIN, "a")
    report = explain_prefix(pool.radix, 4, [0, 1, 50, 51], "a")
    assert report.difference == Difference(position=2, asked=50, cached=2)


@pytest.mark.parametrize("sizes", [{"n_tokens": None}, {"prefix_cache": False}, {"page_size": 1}])
def test_a_pool_without_prefixes_says_so(sizes: dict[str, int | None]) -> None:
    pool = make_pool(**sizes)
    report = explain_prefix(pool.radix, pool.page_size, CHAIN)
    assert (report.is_on, report.num_tokens, report.pages) == (False, 16, ())


def test_looking_takes_nothing_and_keeps_the_order_of_eviction() -> None:
    pool = make_pool(n_tokens=16)
    run(pool, [1] * 5)
    run(pool, [2] * 5)
    before = pool.stats()
    explain_prefix(pool.radix, 4, [1] * 5)
    assert pool.stats() == before
    pool.check()
    run(pool, [3] * 12)
    assert [explain_prefix(pool.radix, 4, [token] * 5).cached_tokens for token in (1, 2)] == [0, 4]


def test_only_so_many_continuations_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_module, "MAX_COMPARED", 3)
    radix = RadixCache(2)
    for page in range(5):
        radix.insert(radix.root, (page, 0), page)
    assert radix.find_nearest(radix.root, [1, 1])[1] == 0
    assert radix.find_nearest(radix.root, [2, 1])[1] == 1


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
)
def test_the_report_is_what_a_task_would_find(recorded: list[list[int]], prompt: list[int]) -> None:
    pool = make_pool(n_tokens=256, page_size=2)
    for other in recorded:
        run(pool, other)
    report = explain_prefix(pool.radix, 2, prompt)
    whole = [tuple(other[: len(other) // 2 * 2]) for other in recorded]
    agreeing = max((_count_equal(prompt, other) for other in whole), default=0)
    # Beyond the page after the last found one nothing is compared.
    assert report.agreeing_tokens == agreeing
    assert run(pool, prompt) == report.cached_tokens
    assert report.cached_tokens == 2 * states(report).count("hit")
    if report.difference is not None:
        assert report.difference.position == agreeing
        assert report.difference.asked == prompt[agreeing] != report.difference.cached
        assert any(
            _count_equal(prompt, other) == agreeing and other[agreeing] == report.difference.cached
            for other in whole
            if len(other) > agreeing
        )
    else:
        assert agreeing == len(prompt) or all(
            len(other) <= agreeing for other in whole if agreeing <= _count_equal(prompt, other)
        )


def _count_equal(prompt: list[int], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b),
        min(len(prompt), len(other)),
    )


def test_a_long_prompt_is_looked_up_in_one_pass() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(4096)]
    pool = make_pool(max_seq_len=8192, n_tokens=8192, max_step_tokens=8192)
    run(pool, prompt)
    changed = [*prompt[:4000], prompt[4000] + 1, *prompt[4001:]]
    report = explain_prefix(pool.radix, 4, changed)
    assert report.cached_tokens == 4000
    assert report.difference == Difference(4000, prompt[4000] + 1, prompt[4000])
