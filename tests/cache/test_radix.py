from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astrai_triton.cache import RadixCache, RadixNode
from astrai_triton.errors import PageOwnershipError


def record(radix: RadixCache, tokens: list[int], first_page: int, salt: str | None = None) -> list[RadixNode]:
    """Insert all full pages of ``tokens``, numbered from ``first_page`` on."""
    node, nodes, size = radix.root, [], radix.page_size
    for idx in range(len(tokens) // size):
        node = radix.insert(node, tuple(tokens[idx * size : (idx + 1) * size]), first_page + idx, salt)
        nodes.append(node)
    return nodes


def match_pages(radix: RadixCache, tokens: list[int], salt: str | None = None) -> list[int]:
    return [node.page for node in radix.match(tokens, salt)]


def test_only_full_pages_match() -> None:
    radix = RadixCache(4)
    record(radix, list(range(12)), 5)
    assert match_pages(radix, list(range(11))) == [5, 6]
    assert match_pages(radix, list(range(3))) == []
    assert match_pages(radix, []) == []


def test_an_equal_page_matches_only_under_the_same_parent() -> None:
    radix = RadixCache(2)
    record(radix, [1, 1, 9, 9], 0)
    record(radix, [2, 2, 9, 9], 2)
    assert match_pages(radix, [2, 2, 9, 9]) == [2, 3]
    assert match_pages(radix, [9, 9]) == []
    assert match_pages(radix, [3, 3, 9, 9]) == []


def test_a_page_matches_only_if_every_token_is_the_same() -> None:
    radix = RadixCache(4)
    record(radix, [1, 2, 3, 4], 0)
    for idx in range(4):
        other = [1, 2, 3, 4]
        other[idx] += 1
        assert match_pages(radix, other) == []


def test_match_stops_after_max_pages() -> None:
    radix = RadixCache(2)
    record(radix, [1, 2, 3, 4, 5, 6], 0)
    assert [node.page for node in radix.match([1, 2, 3, 4, 5, 6], max_pages=2)] == [0, 1]
    assert radix.match([1, 2], max_pages=0) == []


def test_salts_isolate_tenants() -> None:
    radix = RadixCache(2)
    record(radix, [1, 2, 3, 4], 0)
    record(radix, [1, 2, 3, 4], 2, salt="a")
    record(radix, [1, 2, 3, 4], 4, salt="")
    assert match_pages(radix, [1, 2, 3, 4]) == [0, 1]
    assert match_pages(radix, [1, 2, 3, 4], "a") == [2, 3]
    assert match_pages(radix, [1, 2, 3, 4], "") == [4, 5]
    assert match_pages(radix, [1, 2, 3, 4], "b") == []


def test_recording_a_page_that_is_in_place_changes_nothing() -> None:
    radix = RadixCache(2)
    (first,) = record(radix, [1, 2], 0)
    assert radix.insert(radix.root, (1, 2), 0) is first
    assert radix.insert(radix.root, (1, 2), 7) is first
    assert first.page == 0
    assert len(radix) == 1
    radix.check()


def test_recording_a_page_in_two_places_raises() -> None:
    radix = RadixCache(2)
    record(radix, [1, 2], 0)
    with pytest.raises(PageOwnershipError, match="page 0 is already recorded"):
        radix.insert(radix.root, (3, 4), 0)
    radix.check()


def test_recording_under_a_dropped_page_raises() -> None:
    radix = RadixCache(2)
    (node,) = record(radix, [1, 2], 0)
    radix.drop(0)
    with pytest.raises(PageOwnershipError, match="no longer recorded"):
        radix.insert(node, (3, 4), 1)


def test_recording_anything_but_one_page_raises() -> None:
    with pytest.raises(ValueError, match="page_tokens: wanted 2 tokens, got 3"):
        RadixCache(2).insert(RadixCache(2).root, (1, 2, 3), 0)


def test_only_leaves_can_be_dropped() -> None:
    radix = RadixCache(2)
    record(radix, [1, 2, 3, 4], 0)
    with pytest.raises(PageOwnershipError, match="page 0 has 1 recorded continuations"):
        radix.drop(0)
    radix.drop(1)
    radix.drop(0)
    assert len(radix) == 0
    assert not radix.root.children


@pytest.mark.parametrize("page", [0, -1])
def test_dropping_a_page_that_is_not_recorded_raises(page: int) -> None:
    with pytest.raises(PageOwnershipError, match="is not recorded"):
        RadixCache(2).drop(page)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size: wanted >= 1, got 0"):
        RadixCache(0)


def test_digests_name_the_whole_prefix_and_the_salt() -> None:
    radix = RadixCache(1)
    chains = [record(radix, [1, 2], 0), record(radix, [3, 2], 2), record(radix, [1, 2], 4, salt="a")]
    digests = {radix.digest(node) for nodes in chains for node in nodes}
    assert len(digests) == 6


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from astrai_triton.cache.radix import RadixCache\n"
        "radix = RadixCache(2)\n"
        "print(radix.digest(radix.insert(radix.insert(radix.root, (1, 2), 0, 's'), (3, 4), 1, 's')))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    radix = RadixCache(2)
    assert radix.digest(record(radix, [1, 2, 3, 4], 8, "s")[-1]) == other.strip()


def test_a_digest_of_a_very_deep_chain_needs_no_recursion() -> None:
    radix = RadixCache(1)
    nodes = record(radix, list(range(5000)), 0)
    assert len({radix.digest(nodes[-1]), radix.digest(nodes[-2])}) == 2


class RadixMachine(RuleBasedStateMachine):
    """The radix against a dict from (salt, prefix) to page."""

    SALTS = st.sampled_from([None, "a"])
    # Few tokens and pages, so that prefixes coincide.
    TOKENS = st.lists(st.integers(0, 1), max_size=8)

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.radix = RadixCache(page_size)
        self.prefix_to_page: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.next_page = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        size = self.radix.page_size
        return [tuple(tokens[: (idx + 1) * size]) for idx in range(len(tokens) // size)]

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: list[int], salt: str | None) -> None:
        node = self.radix.root
        for prefix in self.prefixes(tokens):
            page = self.prefix_to_page.setdefault((salt, prefix), self.next_page)
            node = self.radix.insert(node, prefix[-self.radix.page_size :], self.next_page, salt)
            assert node.page == page
            assert self.radix.node(page) is node
            self.next_page += 1

    @rule(tokens=TOKENS, salt=SALTS, max_pages=st.none() | st.integers(0, 4))
    def match(self, tokens: list[int], salt: str | None, max_pages: int | None) -> None:
        wanted = []
        for prefix in self.prefixes(tokens)[:max_pages]:
            page = self.prefix_to_page.get((salt, prefix))
            if page is None:
                break
            wanted.append(page)
        assert [node.page for node in self.radix.match(tokens, salt, max_pages)] == wanted

    @precondition(lambda self: self.prefix_to_page)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = salt, prefix = data.draw(st.sampled_from(list(self.prefix_to_page)))
        page, longer = self.prefix_to_page[key], len(prefix) + self.radix.page_size
        if any(s == salt and len(p) == longer and p[: len(prefix)] == prefix for s, p in self.prefix_to_page):
            with pytest.raises(PageOwnershipError):
                self.radix.drop(page)
        else:
            self.radix.drop(page)
            del self.prefix_to_page[key]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "radix"):
            self.radix.check()
            assert sorted(self.radix.pages()) == sorted(self.prefix_to_page.values())
            assert len(self.radix) == len(self.prefix_to_page)


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRadixMachine = RadixMachine.TestCase
