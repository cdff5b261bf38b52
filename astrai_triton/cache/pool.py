"""One owner of the KV cache: gives tasks their slots, shares equal prefixes, binds steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from astrai_triton.cache.allocator import Allocator
from astrai_triton.cache.audit import check_cached
from astrai_triton.cache.lease import Lease, PoolStats
from astrai_triton.cache.radix import RadixCache, RadixNode
from astrai_triton.cache.storage import KVStorage, ReqToTokenPool
from astrai_triton.cache.workspace import Workspace
from astrai_triton.errors import PageOwnershipError
from astrai_triton.kvcache import KVCache


class PagePool:
    """Slots for tasks, in one of two modes. Used by one thread; only ``stats`` may be called from others.

    Contiguous (``n_tokens=None``): ``slot = row * max_seq_len + position``, a row has its slots for good.
    Paged: rows share ``n_tokens`` slots, page by page. With ``page_size > 1`` equal prefixes share pages.

    Ownership in paged mode. A lease holds its pages from position 0 on. The leading ``num_recorded`` of them
    are in the radix, may have other owners and are never written again; the rest have exactly one owner. A
    lease that holds a page holds all pages before it and lets go of the deepest first. Therefore a page
    without owners never has a continuation with one, the page released longest ago is a leaf, and eviction
    takes no search.

    Args:
        n_layers: layers of the model.
        n_q_heads: query heads, a multiple of ``n_kv_heads``.
        n_kv_heads: key and value heads.
        head_dim: elements of a head.
        max_batch_size: leases open at once.
        max_seq_len: positions of a lease.
        max_step_tokens: packed rows of one step.
        page_size: tokens per page; without effect in contiguous mode.
        n_tokens: slots in all, a multiple of ``page_size``; None is contiguous mode.
        prefix_cache: share equal prefixes (paged mode, ``page_size > 1``).
        dtype: of the model and of K and V.
        device: where all tensors live.

    Raises:
        ValueError: an argument is out of range.
        CacheError: the device has not that much memory.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_q_heads: int,
        n_kv_heads: int,
        head_dim: int,
        max_batch_size: int,
        max_seq_len: int,
        max_step_tokens: int,
        page_size: int = 16,
        n_tokens: int | None = None,
        prefix_cache: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        size = _count_slots(max_batch_size, max_seq_len, page_size, n_tokens)
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        self.is_paged = n_tokens is not None
        self.capacity_tokens = min(max_seq_len, size)
        """The most tokens one lease can ever hold."""
        self.storage = KVStorage(size, n_layers, n_kv_heads, head_dim, dtype, device)
        self.req_to_token = ReqToTokenPool(max_batch_size, max_seq_len, device)
        self.workspace = Workspace(
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            max_seq_len=max_seq_len,
            n_q_heads=n_q_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self.radix = RadixCache(page_size) if self.is_paged and page_size > 1 and prefix_cache else None
        # Rows are given like pages; in contiguous mode a row is all there is to give.
        self._row_allocator = Allocator(max_batch_size)
        if self.is_paged:
            self.allocator = Allocator(size // page_size, None if self.radix is None else self.radix.drop)
            self._page_to_slots = np.arange(size, dtype=np.int32).reshape(-1, page_size)
        else:
            self.allocator = self._row_allocator
            self.req_to_token.fill_linear()
        self._row_to_lease: list[Lease | None] = [None] * max_batch_size
        self._hit_tokens = 0
        self._lookup_tokens = 0

    def open(self, prompt_ids: Sequence[int], salt: str | None = None) -> Lease | None:
        """Take a row and the longest cached prefix; take no new pages.

        At least the last token is left to compute, because its logits are wanted; the page it is in is
        private even if an equal one is cached.

        Args:
            prompt_ids: token ids, at least one and at most ``max_seq_len``.
            salt: only prefixes recorded under the same salt are shared.

        Returns:
            The lease, or None if ``max_batch_size`` leases are open.

        Raises:
            ValueError: the prompt is empty or longer than ``max_seq_len``.
        """
        prompt_len = len(prompt_ids)
        if not 1 <= prompt_len <= self.max_seq_len:
            raise ValueError(
                f"prompt_ids: wanted 1 to max_seq_len={self.max_seq_len} tokens, got {prompt_len}"
            )
        if not self._row_allocator.num_free:
            return None
        nodes: list[RadixNode] = []
        if self.radix is not None:
            nodes = self.radix.match(prompt_ids, salt, (prompt_len - 1) // self.page_size)
        (row,) = self._row_allocator.alloc(1)
        pages = [node.page for node in nodes]
        for page in pages:
            self.allocator.retain(page)
        if pages:
            self.req_to_token.write(row, 0, self._page_to_slots[pages].reshape(-1))
        cached_len = len(pages) * self.page_size
        lease = Lease(
            row=row,
            salt=salt,
            cached_len=cached_len,
            num_slots=cached_len if self.is_paged else self.max_seq_len,
            pages=pages,
            num_recorded=len(pages),
            frozen_len=cached_len,
            cursor=nodes[-1] if nodes else None,
            uncounted_len=0 if self.radix is None else prompt_len,
        )
        self._row_to_lease[row] = lease
        return lease

    def pages_needed(self, lease: Lease, num_tokens: int) -> int:
        """New pages ``extend`` would take."""
        if not self.is_paged:
            return 0
        return max(0, -(-num_tokens // self.page_size) - len(lease.pages))

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Make positions 0 to ``num_tokens - 1`` have slots, evicting cached pages if it takes that.

        Raises:
            OutOfPagesError: there are not enough pages; nothing has changed.
            PageOwnershipError: the lease is closed.
            ValueError: ``num_tokens`` is beyond ``max_seq_len``.
        """
        self._require_open(lease)
        if num_tokens <= lease.num_slots:
            return
        if num_tokens > self.max_seq_len:
            raise ValueError(f"num_tokens: wanted at most max_seq_len={self.max_seq_len}, got {num_tokens}")
        new_pages = self.allocator.alloc(self.pages_needed(lease, num_tokens))
        start = len(lease.pages) * self.page_size
        self.req_to_token.write(lease.row, start, self._page_to_slots[new_pages].reshape(-1))
        lease.pages += new_pages
        lease.num_slots = min(len(lease.pages) * self.page_size, self.max_seq_len)
        if lease.uncounted_len:
            self._lookup_tokens += lease.uncounted_len
            self._hit_tokens += lease.cached_len
            lease.uncounted_len = 0

    def record(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Enter the full pages of a task into the radix. O(pages that are new since the last call).

        Where an equal page is in place already, the lease goes over to it and frees its own. Pages that were
        recorded may be shared from then on, so the lease must not write to them again.

        Args:
            lease: open.
            token_ids: all tokens whose K/V is complete, prompt and generated; not the last sampled one.

        Raises:
            PageOwnershipError: the lease is closed.
            ValueError: more tokens than the lease has slots for.
        """
        self._require_open(lease)
        if len(token_ids) > lease.num_slots:
            raise ValueError(
                f"token_ids: wanted at most {lease.num_slots} (the lease's slots), got {len(token_ids)}"
            )
        if self.radix is None:
            return
        size = self.page_size
        for page_idx in range(lease.num_recorded, len(token_ids) // size):
            page, start = lease.pages[page_idx], page_idx * size
            page_tokens = tuple(token_ids[start : start + size])
            node = self.radix.insert(lease.cursor or self.radix.root, page_tokens, page, lease.salt)
            if node.page == page:
                self.allocator.mark_recorded(page)
            else:
                self.allocator.retain(node.page)
                self.allocator.release(page)
                lease.pages[page_idx] = node.page
                self.req_to_token.write(lease.row, start, self._page_to_slots[node.page])
            lease.cursor = node
            lease.num_recorded = page_idx + 1
            lease.frozen_len = start + size

    def close(self, lease: Lease) -> None:
        """Give back the row and all pages, the deepest first; recorded pages nobody else holds stay cached.

        Raises:
            PageOwnershipError: the lease is closed already.
        """
        self._require_open(lease)
        if self.is_paged:
            self.allocator.release_all(reversed(lease.pages))
            self.req_to_token.clear(lease.row)
        self._row_to_lease[lease.row] = None
        self._row_allocator.release(lease.row)
        lease.row = -1
        # No step fits a lease without slots, so bind_tasks needs no test of its own for closed leases.
        lease.num_slots = -1
        lease.num_recorded = 0
        lease.frozen_len = 0
        lease.pages = []
        lease.cursor = None

    def bind_tasks(self, leases: Sequence[Lease], q_lens: Sequence[int], kv_lens: Sequence[int]) -> KVCache:
        """Describe one forward: who takes part, what it reads, where it writes.

        Args:
            leases: ``[batch]`` open leases.
            q_lens: ``[batch]`` rows of each, its last positions; >= 0.
            kv_lens: ``[batch]`` K/V tokens of each with this step's rows.

        Returns:
            Views of buffers that the next call overwrites.

        Raises:
            PageOwnershipError: a lease is closed, or rows would write to a page that may be shared.
            ValueError: lengths do not fit together, the slots or the workspace.
        """
        q_lens, kv_lens = tuple(q_lens), tuple(kv_lens)
        rows = self._rows_of(leases, q_lens, kv_lens)
        return self.workspace.bind(rows, q_lens, kv_lens, self.req_to_token, self.storage)

    def bind_decode(self, rows: npt.NDArray[np.intp], kv_lens: npt.NDArray[np.intp]) -> KVCache:
        """``bind_tasks`` with one row each, for who keeps rows and lengths as arrays.

        Args:
            rows: ``[batch]`` rows of open leases.
            kv_lens: ``[batch]`` K/V tokens of each with this step's row, at least 1.

        Raises:
            PageOwnershipError: a row has no slot at its last position.
            ValueError: as ``bind_tasks``.
        """
        if self.req_to_token.table[rows, kv_lens - 1].min() < 0:
            raise PageOwnershipError(f"rows {rows.tolist()}: wanted a slot at every last position")
        return self.workspace.bind_decode(rows, kv_lens, self.req_to_token, self.storage)

    def view_padded(self, num_rows: int) -> KVCache:
        """The decode step that ``bind_padded`` refills: its tensors stay where they are."""
        return self.workspace.view_padded(num_rows, self.req_to_token, self.storage)

    def bind_padded(self, leases: Sequence[Lease], kv_lens: Sequence[int], num_rows: int) -> None:
        """Describe one decode row of each lease, padded to ``num_rows`` by rows that see and write nothing.

        Raises:
            As ``bind_tasks``.
        """
        rows = self._rows_of(leases, (1,) * len(leases), tuple(kv_lens))
        self.workspace.bind_padded(rows, tuple(kv_lens), num_rows, self.req_to_token)

    def num_free_pages(self) -> int:
        """Pages ``extend`` can take: free or evictable. In contiguous mode, free rows."""
        return self.allocator.num_available

    def reset_prefixes(self) -> None:
        """Forget all cached pages that no lease holds."""
        if self.is_paged:
            self.allocator.evict(self.allocator.num_cached)

    def stats(self) -> PoolStats:
        """Count pages and hits. Safe from any thread; the counts may be of slightly different moments."""
        allocator = self.allocator
        free, cached = allocator.num_free, allocator.num_cached
        return PoolStats(
            total=allocator.n_pages,
            free=free,
            owned=allocator.n_pages - free - cached,
            cached=cached,
            hits_tokens=self._hit_tokens,
            lookup_tokens=self._lookup_tokens,
            evicted_pages=allocator.num_evicted,
        )

    def check(self) -> None:
        """Assert every invariant of ownership. For tests: O(pool), and it reads the device."""
        self._row_allocator.check()
        self.allocator.check()
        self.req_to_token.check()
        leases = [lease for lease in self._row_to_lease if lease is not None]
        assert len(leases) == self._row_allocator.num_owned, "rows taken and open leases differ"
        for lease in leases:
            self._check_lease(lease)
        if not self.is_paged:
            return
        holders = [0] * self.allocator.n_pages
        for lease in leases:
            for page in lease.pages:
                holders[page] += 1
        refs = [self.allocator.num_refs(page) for page in range(self.allocator.n_pages)]
        assert refs == holders, f"references {refs} and holders {holders} differ"
        recorded = {page for page in range(self.allocator.n_pages) if self.allocator.is_recorded(page)}
        shared = {page for page, count in enumerate(holders) if count > 1}
        assert shared <= recorded, f"pages both writable and shared: {shared - recorded}"
        for row, holder in enumerate(self._row_to_lease):
            assert holder or (self.req_to_token.table[row] == -1).all(), f"row {row} is free but not cleared"
        check_cached(self.radix, self.allocator, recorded, holders)

    def _check_lease(self, lease: Lease) -> None:
        row = lease.row
        assert self._row_to_lease[row] is lease, f"row {row} belongs to another lease"
        assert lease.frozen_len == lease.num_recorded * self.page_size, f"row {row}: stale frozen length"
        if not self.is_paged:
            first = row * self.max_seq_len
            slots = np.arange(first, first + self.max_seq_len, dtype=np.int32)
        else:
            slots = self._page_to_slots[lease.pages].reshape(-1)[: self.max_seq_len]
            assert len(set(lease.pages)) == len(lease.pages), f"row {row} holds a page twice"
        table = self.req_to_token.table[row]
        assert slots.size == lease.num_slots, f"row {row} has {slots.size} slots, not {lease.num_slots}"
        assert (table[: slots.size] == slots).all(), f"row {row} does not show the lease's pages"
        assert (table[slots.size :] == -1).all(), f"row {row} shows slots behind the lease's pages"
        node, path = lease.cursor, []
        while node is not None and node.parent is not None:
            path.append(node.page)
            node = node.parent
        assert path[::-1] == lease.pages[: lease.num_recorded], f"row {row}: cursor and recorded pages differ"
        private = lease.pages[lease.num_recorded :]
        assert not any(map(self.allocator.is_recorded, private)), f"row {row} could write to a recorded page"

    def _rows_of(self, leases: Sequence[Lease], q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
        """Rows of leases that can take part in such a step."""
        if not len(leases) == len(q_lens) == len(kv_lens):
            raise ValueError(
                "leases, q_lens, kv_lens: wanted one length, "
                f"got {len(leases)}, {len(q_lens)}, {len(kv_lens)}"
            )
        rows = []
        for lease, q_len, kv_len in zip(leases, q_lens, kv_lens, strict=True):
            if not 0 <= q_len <= kv_len - lease.frozen_len or kv_len > lease.num_slots:
                self._check_lens(lease, q_len, kv_len)
            rows.append(lease.row)
        return rows

    def _check_lens(self, lease: Lease, q_len: int, kv_len: int) -> None:
        """Raise if a lease cannot take part in a step like that, and say why."""
        self._require_open(lease)
        if not 0 <= q_len <= kv_len <= lease.num_slots:
            raise ValueError(
                f"q_lens, kv_lens: wanted 0 <= q_len <= kv_len <= {lease.num_slots} (the slots) for row "
                f"{lease.row}, got {q_len} and {kv_len}; extend the lease first"
            )
        if q_len > 0:
            raise PageOwnershipError(
                f"row {lease.row} would write from position {kv_len - q_len} on, but its first "
                f"{lease.frozen_len} positions are recorded and may be shared"
            )

    @staticmethod
    def _require_open(lease: Lease) -> None:
        if lease.row < 0:
            raise PageOwnershipError("the lease was closed before; open a new one")


def _count_slots(max_batch_size: int, max_seq_len: int, page_size: int, n_tokens: int | None) -> int:
    """Slots of the pool."""
    if min(max_batch_size, max_seq_len, page_size) < 1:
        raise ValueError(
            "max_batch_size, max_seq_len, page_size: wanted >= 1, "
            f"got {max_batch_size}, {max_seq_len}, {page_size}"
        )
    if n_tokens is None:
        return max_batch_size * max_seq_len
    if n_tokens < 1 or n_tokens % page_size:
        above = max(-(-n_tokens // page_size), 1) * page_size
        raise ValueError(
            f"n_tokens: wanted a positive multiple of page_size={page_size}, got {n_tokens}; take {above}"
        )
    return n_tokens
