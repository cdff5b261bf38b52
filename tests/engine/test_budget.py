from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.engine.budget import share_budget


def test_short_prompts_fit_beside_a_long_one() -> None:
    assert share_budget([10_000, 20, 30], 512, 16) == [448, 20, 30]


def test_a_prompt_that_does_not_fit_gets_whole_pages() -> None:
    assert share_budget([1000], 500, 16) == [496]


def test_first_come_first_served_when_there_is_not_a_page_for_everybody() -> None:
    assert share_budget([100, 100, 100], 40, 16) == [16, 16, 0]


def test_the_last_tokens_of_a_prompt_need_no_whole_page() -> None:
    assert share_budget([5, 3], 6, 16) == [5, 0]
    assert share_budget([5, 3], 8, 16) == [5, 3]


@given(
    st.lists(st.integers(1, 300), max_size=12),
    st.integers(1, 600),
    st.sampled_from([1, 4, 16]),
)
def test_shares_stay_within_budget_and_waste_less_than_a_page(
    wanted: list[int], budget: int, page_size: int
) -> None:
    shares = share_budget(wanted, budget, page_size)
    assert sum(shares) <= budget
    for want, share in zip(wanted, shares, strict=True):
        assert 0 <= share <= want
        assert share == want or share % page_size == 0
    if shares != wanted:
        assert budget - sum(shares) < page_size
