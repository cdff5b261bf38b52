from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astrai_triton.cache import Allocator
from astrai_triton.errors import OutOfPagesError, PageOwnershipError


def test_alloc_gives_the_lowest_free_pages() -> None:
    allocator = Allocator(10)
    assert allocator.alloc(4) == [0, 1, 2, 3]
    allocator.release(2)
    allocator.release(0)
    assert allocator.alloc(3) == [0, 2, 4]


def test_alloc_of_nothing_gives_nothing() -> None:
    assert Allocator(1).alloc(0) == []


def test_alloc_spans_the_words_of_the_free_set() -> None:
    allocator = Allocator(5000)
    assert allocator.alloc(5000) == list(range(5000))
    allocator.check()
    for page in (4999, 1023, 1024, 2047):
        allocator.release(page)
    allocator.check()
    assert allocator.alloc(4) == [1023, 1024, 2047, 4999]


def test_a_failed_alloc_changes_nothing() -> None:
    allocator = Allocator(4)
    kept, page, *_ = allocator.alloc(2)
    allocator.mark_recorded(page)
    allocator.release(page)
    with pytest.raises(OutOfPagesError, match="wanted 4 pages, 3 are free or evictable"):
        allocator.alloc(4)
    allocator.check()
    assert (allocator.num_free, allocator.cached_pages(), allocator.num_refs(kept)) == (2, [page], 1)
    assert allocator.num_evicted == 0


def test_alloc_refuses_a_negative_count() -> None:
    with pytest.raises(ValueError, match="n: wanted >= 0, got -1"):
        Allocator(4).alloc(-1)


def test_an_allocator_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="n_pages: wanted >= 1, got 0"):
        Allocator(0)


def test_freeing_a_page_twice_raises() -> None:
    allocator = Allocator(4)
    (page,) = allocator.alloc(1)
    allocator.release(page)
    with pytest.raises(PageOwnershipError, match="page 0 was released more often"):
        allocator.release(page)
    allocator.check()


def test_freeing_a_cached_page_raises() -> None:
    allocator = Allocator(4)
    (page,) = allocator.alloc(1)
    allocator.mark_recorded(page)
    allocator.release(page)
    with pytest.raises(PageOwnershipError):
        allocator.release(page)
    assert allocator.cached_pages() == [page]


@pytest.mark.parametrize("page", [-1, 4])
def test_pages_that_do_not_exist_are_refused(page: int) -> None:
    allocator = Allocator(4)
    allocator.alloc(4)
    for operation in (allocator.release, allocator.retain, allocator.mark_recorded):
        with pytest.raises(PageOwnershipError):
            operation(page)


def test_retaining_a_free_page_raises() -> None:
    with pytest.raises(PageOwnershipError, match="page 2 is free"):
        Allocator(4).retain(2)


def test_recording_a_page_without_owner_raises() -> None:
    with pytest.raises(PageOwnershipError, match="page 2 has no owner"):
        Allocator(4).mark_recorded(2)


def test_a_page_is_free_only_after_its_last_owner_let_go() -> None:
    allocator = Allocator(1)
    (page,) = allocator.alloc(1)
    allocator.retain(page)
    allocator.release(page)
    with pytest.raises(OutOfPagesError):
        allocator.alloc(1)
    allocator.release(page)
    assert allocator.alloc(1) == [page]


def test_the_page_released_first_is_evicted_first_and_told() -> None:
    evicted: list[int] = []
    allocator = Allocator(3, evicted.append)
    pages = allocator.alloc(3)
    for page in pages:
        allocator.mark_recorded(page)
    allocator.release_all([pages[2], pages[0], pages[1]])
    allocator.retain(pages[2])
    allocator.release(pages[2])
    assert allocator.alloc(2) == [pages[0], pages[1]]
    assert evicted == [pages[0], pages[1]]
    assert allocator.num_evicted == 2


def test_alloc_evicts_no_more_than_it_must() -> None:
    allocator = Allocator(4)
    pages = allocator.alloc(3)
    for page in pages:
        allocator.mark_recorded(page)
    allocator.release_all(pages)
    allocator.alloc(2)
    assert allocator.num_cached == 2
    assert allocator.num_free == 0


def test_an_evicted_page_is_no_longer_recorded() -> None:
    allocator = Allocator(1)
    (page,) = allocator.alloc(1)
    allocator.mark_recorded(page)
    allocator.release(page)
    allocator.alloc(1)
    allocator.release(page)
    assert (allocator.num_free, allocator.num_cached) == (1, 0)


def test_evict_refuses_more_than_is_cached() -> None:
    with pytest.raises(ValueError, match="wanted 0 to 0"):
        Allocator(4).evict(1)


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against sets, counts and a list."""

    @initialize(n_pages=st.sampled_from([1, 7, 1024, 1030]))
    def start(self, n_pages: int) -> None:
        self.evicted: list[int] = []
        self.allocator = Allocator(n_pages, self.evicted.append)
        self.free = set(range(n_pages))
        self.refs: dict[int, int] = {}
        self.recorded: set[int] = set()
        self.lru: list[int] = []
        # The larger pools would hide what happens at their limit.
        if n_pages > 7:
            pages = self.allocator.alloc(n_pages - 5)
            self.free -= set(pages)
            self.refs.update(dict.fromkeys(pages[-5:], 1))
            self.held_for_good = pages[:-5]
        else:
            self.held_for_good = []

    @rule(n=st.integers(0, 8))
    def alloc(self, n: int) -> None:
        if n > len(self.free) + len(self.lru):
            with pytest.raises(OutOfPagesError):
                self.allocator.alloc(n)
            return
        short = max(0, n - len(self.free))
        gone, self.lru = self.lru[:short], self.lru[short:]
        self.recorded -= set(gone)
        self.free |= set(gone)
        wanted = sorted(self.free)[:n]
        self.evicted.clear()
        assert self.allocator.alloc(n) == wanted
        assert self.evicted == gone
        self.free -= set(wanted)
        self.refs.update(dict.fromkeys(wanted, 1))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.allocator.release(page)
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.refs[page]
            if page in self.recorded:
                self.lru.append(page)
            else:
                self.free.add(page)

    @rule(page=st.integers(0, 1029))
    def retain(self, page: int) -> None:
        if page in self.held_for_good:
            return
        if page in self.refs:
            self.refs[page] += 1
        elif page in self.lru:
            self.lru.remove(page)
            self.refs[page] = 1
        else:
            with pytest.raises(PageOwnershipError):
                self.allocator.retain(page)
            return
        self.allocator.retain(page)

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def retain_cached(self, data: st.DataObject) -> None:
        self.retain(data.draw(st.sampled_from(self.lru)))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.allocator.mark_recorded(page)
        self.recorded.add(page)

    @precondition(lambda self: self.free or self.lru)
    @rule(data=st.data())
    def release_without_owning(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free | set(self.lru))))
        with pytest.raises(PageOwnershipError):
            self.allocator.release(page)

    @rule(n=st.integers(0, 3))
    def evict(self, n: int) -> None:
        n = min(n, len(self.lru))
        self.evicted.clear()
        self.allocator.evict(n)
        gone, self.lru = self.lru[:n], self.lru[n:]
        assert self.evicted == gone
        self.recorded -= set(gone)
        self.free |= set(gone)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        assert self.allocator.num_free == len(self.free)
        assert self.allocator.cached_pages() == self.lru
        assert self.allocator.num_owned == len(self.refs) + len(self.held_for_good)
        assert self.allocator.num_available == len(self.free) + len(self.lru)
        assert all(self.allocator.num_refs(page) == refs for page, refs in self.refs.items())
        assert all(self.allocator.is_recorded(page) == (page in self.recorded) for page in self.refs)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
