"""What a task holds of the pool, and what the pool tells about itself."""

from __future__ import annotations

import attrs

from astrai_triton.cache.radix import RadixNode


@attrs.define(eq=False)
class Lease:
    """A task's hold on the pool, from ``PagePool.open`` to ``PagePool.close``. Only the pool changes it."""

    row: int
    """Row of ``req_to_token``; -1 once closed."""
    salt: str | None
    cached_len: int
    """Leading tokens whose K/V were in the cache when the lease was opened."""
    num_slots: int
    """Leading positions that have slots; -1 once closed."""
    pages: list[int] = attrs.field(repr=False)
    """Pages by position. The first ``num_recorded`` may be shared and are never written again."""
    num_recorded: int
    """Leading pages that are in the radix."""
    frozen_len: int
    """Leading positions that must not be written: those of the recorded pages."""
    cursor: RadixNode | None = attrs.field(repr=False)
    """Node of the last recorded page."""
    uncounted_len: int
    """Prompt tokens missing in the hit statistics: a lease counts once it takes pages."""


@attrs.frozen
class PoolStats:
    """Pages by state, and how well prefixes are found. In contiguous mode a page is a whole row."""

    total: int
    free: int
    owned: int
    cached: int
    hits_tokens: int
    """Prompt tokens whose K/V were found, over all leases that took pages."""
    lookup_tokens: int
    """Prompt tokens looked up, over the same leases."""
    evicted_pages: int
    """Cached pages that had to go to make room."""
