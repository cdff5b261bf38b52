"""What must hold between the pages that are cached and the tree that finds them. For tests."""

from __future__ import annotations

from collections.abc import Sequence, Set

from astrai_triton.cache.allocator import Allocator
from astrai_triton.cache.radix import RadixCache


def check_cached(
    radix: RadixCache | None, allocator: Allocator, recorded: Set[int], holders: Sequence[int]
) -> None:
    """Assert that pages worth keeping are found, and that eviction would go from the leaves up.

    Args:
        radix: None: nothing is cached.
        allocator: owner of the pages.
        recorded: pages that are marked as recorded.
        holders: number of leases that hold each page.
    """
    if radix is None:
        assert not recorded, "pages are recorded without a radix"
        return
    radix.check()
    assert recorded == set(radix.pages()), "recorded pages and pages in the radix differ"
    order = {page: age for age, page in enumerate(allocator.cached_pages())}
    for page in recorded:
        node = radix.node(page)
        assert node is not None
        for child in node.children.values():
            assert holders[page] >= holders[child.page], (
                f"page {child.page} has owners that do not hold page {page}"
            )
            if page in order:
                assert order[child.page] < order[page], (
                    f"page {page} would be evicted before page {child.page}"
                )
