"""Which page holds the K/V of which tokens after which prefix."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

import attrs

from astrai_triton.errors import PageOwnershipError

Edge = tuple[int | str | None, ...]
"""The tokens of one page, exactly. Below the root they follow the salt, so tenants share no node."""

MAX_COMPARED = 4096
"""Continuations that ``RadixCache.find_nearest`` looks at."""


@attrs.define(eq=False)
class RadixNode:
    """One recorded page. The way from the root spells the tokens whose K/V the pages on it hold."""

    edge: Edge
    page: int
    """-1 for the root, which holds no tokens."""
    parent: RadixNode | None = attrs.field(repr=False)
    children: dict[Edge, RadixNode] = attrs.field(factory=dict, repr=False)
    digest: bytes | None = attrs.field(default=None, repr=False)
    """Cached by ``RadixCache.digest``."""


class RadixCache:
    """Exact, page-aligned prefixes.

    A page matches only if it holds exactly the wanted tokens and its parent matched: equal pages after
    different prefixes hold different K/V. Nothing here is decided by a hash of tokens.

    The cache owns no pages. Whoever takes pages found here retains them parents first and releases them
    deepest first; then a page without owners has no child with one, and the least recently released page is
    always a leaf.

    Args:
        page_size: tokens per page, >= 1.

    Raises:
        ValueError: ``page_size`` is below 1.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: wanted >= 1, got {page_size}")
        self.page_size = page_size
        self.root = RadixNode(edge=(), page=-1, parent=None)
        self._page_to_node: dict[int, RadixNode] = {}

    def __len__(self) -> int:
        """Recorded pages."""
        return len(self._page_to_node)

    def match(
        self, tokens: Sequence[int], salt: str | None = None, max_pages: int | None = None
    ) -> list[RadixNode]:
        """Find the longest recorded prefix. O(tokens found).

        Args:
            tokens: token ids from position 0.
            salt: only pages recorded under the same salt match.
            max_pages: stop after so many pages; None is no limit.

        Returns:
            The nodes of the leading full pages, the first page first.
        """
        size = self.page_size
        num_pages = len(tokens) // size
        if max_pages is not None:
            num_pages = min(num_pages, max_pages)
        node, nodes = self.root, []
        for start in range(0, num_pages * size, size):
            edge: Edge = tuple(tokens[start : start + size])
            child = node.children.get(edge if start else (salt, *edge))
            if child is None:
                break
            node = child
            nodes.append(node)
        return nodes

    def find_nearest(
        self, parent: RadixNode, tokens: Sequence[int], salt: str | None = None
    ) -> tuple[RadixNode | None, int]:
        """Find the recorded continuation that agrees with ``tokens`` the longest. For people who ask why a
        page was not found; O(page_size + ``MAX_COMPARED``).

        Args:
            parent: ``root`` or a node of this cache.
            tokens: what comes after ``parent``.
            salt: only pages recorded under the same salt count.

        Returns:
            A child of ``parent`` and the number of leading tokens that agree; None and 0 if there is no child
            among the ``MAX_COMPARED`` recorded last. Of equals the one recorded last.
        """
        wanted: Edge = (salt, *tokens) if parent is self.root else tuple(tokens)
        num_salts = len(wanted) - len(tokens)
        nearest, most = None, num_salts - 1
        for edge, child in islice(reversed(parent.children.items()), MAX_COMPARED):
            agreeing = _count_agreeing(edge, wanted)
            if agreeing > most:
                nearest, most = child, agreeing
        return nearest, 0 if nearest is None else most - num_salts

    def insert(
        self, parent: RadixNode, page_tokens: tuple[int, ...], page: int, salt: str | None = None
    ) -> RadixNode:
        """Record ``page`` as the continuation of ``parent``, unless an equal page is in place. O(page_size).

        Args:
            parent: ``root`` or a node of this cache.
            page_tokens: exactly ``page_size`` token ids.
            page: a page that is not recorded yet; ignored if an equal page is in place.
            salt: the salt of the whole prefix.

        Returns:
            The node in place. Its ``page`` is another one than the argument if an equal page was there
            before.

        Raises:
            ValueError: ``page_tokens`` is not one page long.
            PageOwnershipError: ``parent`` was dropped, or ``page`` is recorded somewhere else.
        """
        if len(page_tokens) != self.page_size:
            raise ValueError(f"page_tokens: wanted {self.page_size} tokens, got {len(page_tokens)}")
        is_root = parent is self.root
        if not is_root and self._page_to_node.get(parent.page) is not parent:
            raise PageOwnershipError(
                f"page {parent.page} is no longer recorded; hold a page while extending it"
            )
        edge: Edge = (salt, *page_tokens) if is_root else page_tokens
        node = parent.children.get(edge)
        if node is None:
            if page in self._page_to_node:
                raise PageOwnershipError(f"page {page} is already recorded after another prefix")
            node = RadixNode(edge=edge, page=page, parent=parent)
            parent.children[edge] = node
            self._page_to_node[page] = node
        return node

    def drop(self, page: int) -> None:
        """Forget a leaf.

        Raises:
            PageOwnershipError: the page is not recorded, or pages that continue it are.
        """
        node = self._page_to_node.get(page)
        if node is None or node.parent is None:
            raise PageOwnershipError(f"page {page} is not recorded")
        if node.children:
            raise PageOwnershipError(
                f"page {page} has {len(node.children)} recorded continuations; drop them first"
            )
        del node.parent.children[node.edge]
        del self._page_to_node[page]

    def node(self, page: int) -> RadixNode | None:
        """The node of a page, None if the page is not recorded."""
        return self._page_to_node.get(page)

    def pages(self) -> list[int]:
        """All recorded pages, in the order in which they were recorded."""
        return list(self._page_to_node)

    def digest(self, node: RadixNode) -> str:
        """Name a prefix, equal for equal salt and tokens in any process. For people, never to match by.

        Returns:
            32 hexadecimal digits.
        """
        pending = []
        while node.digest is None:
            pending.append(node)
            if node.parent is None:
                break
            node = node.parent
        known = node.digest or b""
        for node in reversed(pending):
            known = node.digest = blake2b(known + repr(node.edge).encode(), digest_size=16).digest()
        return known.hex()

    def check(self) -> None:
        """Assert that exactly the recorded pages are reachable and that links and edges agree. O(pages)."""
        reached = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            for edge, child in node.children.items():
                assert child.parent is node, f"page {child.page} does not point back to page {node.page}"
                assert child.edge == edge, f"page {child.page} hangs on an edge that is not its own"
                assert len(edge) == self.page_size + (node is self.root), (
                    f"page {child.page} is not one page long"
                )
                assert child.page not in reached, f"page {child.page} is recorded twice"
                reached[child.page] = child
                stack.append(child)
        assert reached == self._page_to_node, "recorded pages and pages reachable from the root differ"


def _count_agreeing(edge: Edge, wanted: Edge) -> int:
    """Leading items that are equal."""
    for i, (item, other) in enumerate(zip(edge, wanted, strict=False)):
        if item != other:
            return i
    return min(len(edge), len(wanted))
