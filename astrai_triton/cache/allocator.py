"""Which pages are free, owned or cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from astrai_triton.errors import OutOfPagesError, PageOwnershipError

_WORD_BITS = 1024


class Allocator:
    """Page states, reference counts and the eviction order.

    ::

                     alloc                 last release, recorded
        free  ----------------------->  owned  ----------------------->  cached
         ^ ^                           |     ^                             |  |
         | +---------------------------+     +-----------------------------+  |
         |   last release, not recorded                   retain              |
         +--------------------------------------------------------------------+
                    eviction by alloc or evict, the first released first

    Free pages are bits of ``_WORD_BITS``-wide words, with one summary bit per word that has any, so the
    lowest free page is found in constant time. Cached pages leave in the order in which they were released:
    who releases a chain of pages deepest first has its leaves evicted first.

    Args:
        n_pages: pages in the pool, >= 1.
        on_evict: told each cached page right before it becomes free.

    Raises:
        ValueError: ``n_pages`` is below 1.
    """

    def __init__(self, n_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages: wanted >= 1, got {n_pages}")
        self.n_pages = n_pages
        self.num_free = n_pages
        self.num_evicted = 0
        """Cached pages that had to go because ``alloc`` needed room."""
        self._on_evict = on_evict
        num_words, rest = divmod(n_pages, _WORD_BITS)
        self._words = [(1 << _WORD_BITS) - 1] * num_words + ([(1 << rest) - 1] if rest else [])
        self._summary = (1 << len(self._words)) - 1
        self._refs = [0] * n_pages
        self._recorded = bytearray(n_pages)
        self._lru: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Pages nobody owns whose content is worth keeping."""
        return len(self._lru)

    @property
    def num_owned(self) -> int:
        """Pages with at least one owner."""
        return self.n_pages - self.num_free - len(self._lru)

    @property
    def num_available(self) -> int:
        """Pages ``alloc`` can give: free or evictable."""
        return self.num_free + len(self._lru)

    def num_refs(self, page: int) -> int:
        """Owners of ``page``."""
        return self._refs[page]

    def is_recorded(self, page: int) -> bool:
        """True if ``page`` stays cached after its last release."""
        return bool(self._recorded[page])

    def cached_pages(self) -> list[int]:
        """Cached pages, the next to be evicted first."""
        return list(self._lru)

    def alloc(self, n: int) -> list[int]:
        """Take ``n`` pages, the lowest free ones, after evicting as many cached pages as it takes.

        Returns:
            ``n`` distinct pages with one owner each.

        Raises:
            OutOfPagesError: fewer than ``n`` are free or cached; nothing has changed.
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"n: wanted >= 0, got {n}")
        if n > self.num_available:
            raise OutOfPagesError(n, self.num_available)
        short = n - self.num_free
        if short > 0:
            self.evict(short)
            self.num_evicted += short
        words, refs = self._words, self._refs
        pages: list[int] = []
        while len(pages) < n:
            word_idx = (self._summary & -self._summary).bit_length() - 1
            word = words[word_idx]
            base = word_idx * _WORD_BITS - 1
            for _ in range(n - len(pages)):
                lowest = word & -word
                page = base + lowest.bit_length()
                word ^= lowest
                refs[page] = 1
                pages.append(page)
                if not word:
                    self._summary ^= 1 << word_idx
                    break
            words[word_idx] = word
        self.num_free -= n
        return pages

    def evict(self, n: int) -> None:
        """Turn the ``n`` cached pages that were released first into free ones.

        Raises:
            ValueError: ``n`` is negative or more than are cached; nothing has changed.
        """
        if not 0 <= n <= len(self._lru):
            raise ValueError(f"n: wanted 0 to {len(self._lru)} (the cached pages), got {n}")
        for _ in range(n):
            page = next(iter(self._lru))
            if self._on_evict is not None:
                self._on_evict(page)
            del self._lru[page]
            self._recorded[page] = 0
            self._give_back(page)

    def retain(self, page: int) -> None:
        """Add an owner to an owned or cached page.

        Raises:
            PageOwnershipError: the page is free or does not exist.
        """
        if not 0 <= page < self.n_pages:
            raise PageOwnershipError(f"page {page} does not exist, the pool has {self.n_pages}")
        if self._refs[page] == 0:
            if page not in self._lru:
                raise PageOwnershipError(f"page {page} is free; take it with alloc, not with retain")
            del self._lru[page]
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner; the last one leaves the page cached if it was recorded, else free.

        Raises:
            PageOwnershipError: the page has no owner or does not exist.
        """
        if not 0 <= page < self.n_pages:
            raise PageOwnershipError(f"page {page} does not exist, the pool has {self.n_pages}")
        refs = self._refs[page]
        if refs == 0:
            raise PageOwnershipError(f"page {page} was released more often than it was taken")
        self._refs[page] = refs - 1
        if refs > 1:
            return
        if self._recorded[page]:
            self._lru[page] = None
        else:
            self._give_back(page)

    def release_all(self, pages: Iterable[int]) -> None:
        """Release ``pages`` in their order; of a chain, give the deepest page first."""
        for page in pages:
            self.release(page)

    def mark_recorded(self, page: int) -> None:
        """Keep the content of an owned page: after its last release it is cached, until it is evicted.

        Raises:
            PageOwnershipError: the page has no owner or does not exist.
        """
        if not 0 <= page < self.n_pages or self._refs[page] == 0:
            raise PageOwnershipError(f"page {page} has no owner, so its content is not known to be valid")
        self._recorded[page] = 1

    def check(self) -> None:
        """Assert that every page is in exactly one state and that all counts agree. O(n_pages)."""
        free: set[int] = set()
        for word_idx, word in enumerate(self._words):
            assert bool(word) == bool(self._summary >> word_idx & 1), (
                f"summary bit of word {word_idx} is stale"
            )
            bits = (bit for bit in range(word.bit_length()) if word >> bit & 1)
            free.update(word_idx * _WORD_BITS + bit for bit in bits)
        assert len(free) == self.num_free, f"{len(free)} free bits, count says {self.num_free}"
        owned = {page for page in range(self.n_pages) if self._refs[page] > 0}
        assert not free & owned, f"pages both free and owned: {free & owned}"
        assert not free & self._lru.keys(), f"pages both free and cached: {free & self._lru.keys()}"
        assert not owned & self._lru.keys(), f"pages both owned and cached: {owned & self._lru.keys()}"
        assert len(free) + len(owned) + len(self._lru) == self.n_pages, "free + owned + cached != total"
        assert all(self._refs[page] >= 0 for page in range(self.n_pages)), "negative reference count"
        assert all(self._recorded[page] for page in self._lru), "a cached page is not recorded"
        assert not any(self._recorded[page] for page in free), "a free page is still recorded"

    def _give_back(self, page: int) -> None:
        word_idx, bit = divmod(page, _WORD_BITS)
        self._words[word_idx] |= 1 << bit
        self._summary |= 1 << word_idx
        self.num_free += 1
