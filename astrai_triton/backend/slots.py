"""One step's way from positions to slots: checked, made safe to read, and kept for all layers of the step.

Nothing that is not referenced is ever read: a position that must not count (past the end, a negative slot,
hidden by a mask) reads the request's first wanted slot again and its score is masked. So whatever lies in
unused slots, NaN included, cannot reach a result, without a second pass over K and V.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs
import torch

from astrai_triton.kvcache import KVCache


@attrs.frozen(eq=False)
class Writes:
    """Slots that receive this step's K and V."""

    slots: torch.Tensor
    """``[W]`` int64, every one of them writable."""
    rows: torch.Tensor | None
    """``[W]`` int64, the packed row that goes to each slot; None is every row in order."""
    any_row: torch.Tensor | None
    """bool scalar on the device, False when no row has a slot; None when that is known not to be so."""

    def store(self, layer: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows ``[T, Hkv, D]`` into layer ``[size, Hkv, D]``, in place; rows without a slot are lost."""
        if self.rows is not None:
            rows = rows.index_select(0, self.rows)
            if self.any_row is not None:
                rows = torch.where(self.any_row, rows, layer.index_select(0, self.slots))
        layer.index_copy_(0, self.slots, rows)


class SlotTable:
    """The index tensors of one KVCache, in the form that torch indexing takes.

    Args:
        cache: the step's cache. Not kept, so that nothing made from it outlives its step.
        may_read: whether asking a tensor for a value is free. On a CPU it is, and slots and rows out of range
            are then errors; on a device it would wait for the queue, and they count as negative slots.
    """

    def __init__(self, cache: KVCache, may_read: bool) -> None:
        self.may_read = may_read
        self.device = cache.k_buffer.device
        self.dtype = cache.k_buffer.dtype
        self.shapes = tuple(zip(cache.q_lens, cache.kv_lens, strict=True))
        self.max_len = cache.max_len
        self.kv_lens = cache.seq_lens.long()
        self._req_to_token = cache.req_to_token
        self._size = cache.k_buffer.shape[1]
        self._rows = cache.req_pool_indices.long()[:, None]
        num_reqs = cache.req_to_token.shape[0]
        self._row_valid = (self._rows >= 0) & (self._rows < num_reqs)
        if not may_read:
            self._rows = self._rows.clamp(0, max(num_reqs - 1, 0))
        elif not bool(self._row_valid.all()):
            raise ValueError(
                f"kv_cache.req_pool_indices: wanted rows 0 to {num_reqs - 1} of req_to_token, "
                f"got {self._rows.flatten().tolist()}"
            )

    def lookup(
        self, positions: torch.Tensor, wanted: torch.Tensor, requests: slice | torch.Tensor = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of positions.

        Args:
            positions: ``[n, W]`` int64, 0 to the width of ``req_to_token`` - 1.
            wanted: bool, broadcastable to positions; False entries are not checked.
            requests: the ``n`` requests they belong to.

        Returns:
            ``[n, W]`` int64 slots and bool, which of the wanted ones can be read.

        Raises:
            ValueError: a wanted slot lies beyond the pool, where that can be seen without waiting.
        """
        slots = self._req_to_token[self._rows[requests], positions].long()
        wanted = wanted & self._row_valid[requests]
        if self.may_read:
            self._check(slots.masked_fill(~wanted, -1), "req_to_token")
        return slots, wanted & (slots >= 0) & (slots < self._size)

    def redirect(self, slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """``[n, W]`` slots, each unwanted one replaced by the first wanted one of its request, flattened."""
        first = wanted.int().argmax(dim=1, keepdim=True)
        return self._clamp(torch.where(wanted, slots, slots.gather(1, first))).flatten()

    def plan_writes(self, out_cache_loc: torch.Tensor) -> Writes:
        """Where rows with slots ``out_cache_loc [T]`` go.

        Raises:
            ValueError: a slot lies beyond the pool, where that can be seen without waiting.
        """
        slots = out_cache_loc.long()
        valid = (slots >= 0) & (slots < self._size)
        if self.may_read:
            self._check(slots, "out_cache_loc")
            if bool(valid.all()):
                return Writes(slots, None, None)
            rows = valid.nonzero().squeeze(1)
            return Writes(slots.index_select(0, rows), rows, None)
        if not slots.numel():
            return Writes(slots, None, None)
        # Only the device knows which rows have slots: a row without one repeats the first that has.
        rows = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), valid.int().argmax())
        return Writes(self._clamp(slots.index_select(0, rows)), rows, valid.any())

    def _clamp(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.clamp(0, max(self._size - 1, 0))

    def _check(self, slots: torch.Tensor, field: str) -> None:
        largest = int(slots.max()) if slots.numel() else -1
        if largest >= self._size:
            raise ValueError(
                f"kv_cache.{field}: wanted slots below the pool size {self._size} (negative is masked), "
                f"got {largest}"
            )


PlanT = TypeVar("PlanT")


class PlanCache(Generic[PlanT]):
    """What a backend worked out for the steps in flight; each plan goes when its KVCache does.

    Args:
        make: builds a plan from a KVCache and ``may_read``; the plan must not hold the KVCache.
        may_read: see ``SlotTable``; None decides by the cache's device.
    """

    def __init__(self, make: Callable[[KVCache, bool], PlanT], may_read: bool | None = None) -> None:
        self._make = make
        self._may_read = may_read
        self._plans: weakref.WeakKeyDictionary[KVCache, PlanT] = weakref.WeakKeyDictionary()

    def plan(self, cache: KVCache) -> PlanT:
        """The plan of ``cache``, made on first sight; the tensors of a KVCache must not change after that."""
        plan = self._plans.get(cache)
        if plan is None:
            may_read = cache.k_buffer.device.type == "cpu" if self._may_read is None else self._may_read
            plan = self._plans[cache] = self._make(cache, may_read)
        return plan
