"""How the tokens of one step are divided among prompts. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

PolicyName = Literal["budget", "fcfs"]


def share_budget(wanted: Sequence[int], budget: int, page_size: int) -> list[int]:
    """Divide a step's tokens among prompts so that a long one delays no short one.

    Everybody gets an equal share; what the short ones leave goes to the others. A prompt that does not fit
    gets whole pages, so that what it leaves behind when it is cancelled or preempted can be reused. Where
    there is not a page for everybody, those who came first get one.

    Args:
        wanted: tokens left of each prompt, >= 1, in order of arrival.
        budget: tokens to give.
        page_size: tokens of a page.

    Returns:
        Tokens for each prompt; the sum is at most ``budget``.
    """
    shares = [0] * len(wanted)
    open_idx = list(range(len(wanted)))
    while open_idx:
        share = max(budget // len(open_idx) // page_size * page_size, page_size)
        before = budget
        for i in tuple(open_idx):
            left = wanted[i] - shares[i]
            grant = min(left, share, budget)
            if grant < left:
                grant -= grant % page_size
            shares[i] += grant
            budget -= grant
            if shares[i] == wanted[i]:
                open_idx.remove(i)
        if budget == before:
            break
    return shares


def share_in_order(wanted: Sequence[int], budget: int, page_size: int) -> list[int]:
    """Give each prompt all it wants, first come, first served; for comparison with ``share_budget``.

    Args, returns: as ``share_budget``.
    """
    shares = []
    for left in wanted:
        grant = min(left, budget)
        if grant < left:
            grant -= grant % page_size
        shares.append(grant)
        budget -= grant
        if grant < left:
            break
    return shares + [0] * (len(wanted) - len(shares))


POLICIES: Mapping[PolicyName, Callable[[Sequence[int], int, int], list[int]]] = MappingProxyType(
    {"budget": share_budget, "fcfs": share_in_order}
)
"""``budget``: equal shares, a long prompt delays no short one. ``fcfs``: one prompt after the other."""
