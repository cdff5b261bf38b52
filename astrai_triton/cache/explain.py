"""What the prefix cache would give a prompt, page by page, and what keeps it from giving more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from astrai_triton.cache.radix import RadixCache

PageState = Literal["hit", "recomputed", "missing", "partial"]


@attrs.frozen
class PageReport:
    """One page of a prompt."""

    start: int
    """Position of its first token."""
    end: int
    """Position after its last one."""
    state: PageState
    """``hit``: a task would take it from the cache. ``recomputed``: it is cached, but it holds the prompt's
    last token, whose logits are wanted. ``missing``: it is not cached. ``partial``: the prompt ends in it,
    and only whole pages are cached."""
    digest: str | None = None
    """Name of the prefix up to its end, equal in any process; None where the page is not cached."""


@attrs.frozen
class Difference:
    """Where a prompt parts from what is cached."""

    position: int
    """Of the token in the prompt, from 0."""
    asked: int
    """The prompt's token there."""
    cached: int
    """The token of the nearest cached continuation there."""


@attrs.frozen
class PrefixReport:
    """What the prefix cache holds of a prompt."""

    page_size: int
    is_on: bool
    """False: this pool shares no prefixes, and there is nothing more to tell."""
    num_tokens: int
    """Of the prompt."""
    cached_tokens: int = 0
    """Leading tokens that a task with this prompt would find."""
    agreeing_tokens: int = 0
    """Leading tokens that something cached begins with as well, whole pages or not."""
    pages: tuple[PageReport, ...] = ()
    difference: Difference | None = None
    """None: nothing cached continues the pages found, or it agrees with the prompt to the prompt's end."""


def explain_prefix(
    radix: RadixCache | None, page_size: int, token_ids: Sequence[int], salt: str | None = None
) -> PrefixReport:
    """Look a prompt up without taking anything. O(prompt); in the thread that owns ``radix``.

    Args:
        radix: the cache; None is a pool without one.
        page_size: tokens of a page.
        token_ids: the prompt, at least one token.
        salt: as for ``PagePool.open``.
    """
    num_tokens = len(token_ids)
    if radix is None:
        return PrefixReport(page_size, False, num_tokens)
    nodes = radix.match(token_ids, salt)
    # As PagePool.open has it: the page with the last token is always computed anew.
    num_hits = min(len(nodes), (num_tokens - 1) // page_size)
    pages = []
    for i, start in enumerate(range(0, num_tokens, page_size)):
        end = min(start + page_size, num_tokens)
        if i < len(nodes):
            state: PageState = "hit" if i < num_hits else "recomputed"
            pages.append(PageReport(start, end, state, radix.digest(nodes[i])))
        else:
            pages.append(PageReport(start, end, "missing" if end - start == page_size else "partial"))
    found = len(nodes) * page_size
    rest = token_ids[found : found + page_size]
    nearest, num_agreeing = radix.find_nearest(nodes[-1] if nodes else radix.root, rest, salt)
    difference = None
    if nearest is not None and num_agreeing < len(rest):
        cached = nearest.edge[num_agreeing - page_size]
        assert isinstance(cached, int), "a page's tokens are ints"
        difference = Difference(found + num_agreeing, rest[num_agreeing], cached)
    return PrefixReport(
        page_size,
        is_on=True,
        num_tokens=num_tokens,
        cached_tokens=num_hits * page_size,
        agreeing_tokens=found + num_agreeing,
        pages=tuple(pages),
        difference=difference,
    )
