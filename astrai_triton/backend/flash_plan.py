"""Which slots one step of the flash-attn backend reads: its kernels take lengths, not masks."""

from __future__ import annotations

import attrs
import torch

from astrai_triton.backend.dense import first_visible
from astrai_triton.backend.plan import StepPlan
from astrai_triton.kvcache import KVCache


@attrs.frozen(eq=False)
class CompactReads:
    """Keys of one row per request, those that it sees first."""

    width: int
    slots: torch.Tensor
    """``[B * width]`` int64, every one of them readable."""
    counts: torch.Tensor
    """``[B]`` int32, how many of the ``width`` keys the row sees."""


@attrs.frozen(eq=False)
class PackedReads:
    """Keys of ragged rows, request after request."""

    slots: torch.Tensor
    """``[sum of key counts]`` int64."""
    indptr: torch.Tensor
    """``[B + 1]`` int32, prefix sum of the key counts."""
    longest: int
    """Most keys of any request."""
    has_holes: bool
    """Some slot cannot be read and would have to be masked."""


class FlashPlan:
    """The reads and writes of one step, found once and shared by its layers.

    Args:
        cache: the step's cache; not kept.
        may_read: see ``SlotTable``.
    """

    def __init__(self, cache: KVCache, may_read: bool) -> None:
        self._steps = StepPlan(cache, may_read)
        self._table = self._steps.table
        self._qo_indptr = cache.qo_indptr
        self._decode: dict[int, CompactReads] = {}
        self._prefill: dict[int, PackedReads] = {}
        self.writes = self._steps.writes

    def decode_reads(self, window: int) -> CompactReads:
        """Keys of one row per request; ``window`` is how many before its own it sees, -1 all. Never waits."""
        reads = self._decode.get(window)
        if reads is None:
            reads = self._decode[window] = self._plan_decode(window)
        return reads

    def prefill_reads(self, window: int) -> PackedReads:
        """Keys of ragged rows. On a device this waits for it, once per step and window."""
        reads = self._prefill.get(window)
        if reads is None:
            reads = self._prefill[window] = self._plan_prefill(window)
        return reads

    def _plan_decode(self, window: int) -> CompactReads:
        padded = self._steps.decode_reads(window)
        keep = padded.visible.keep
        if keep is None:
            return CompactReads(0, padded.slots, torch.zeros_like(self._table.kv_lens, dtype=torch.int32))
        seen = keep[:, 0]
        order = seen.int().argsort(dim=1, descending=True, stable=True)
        slots = padded.slots.view(padded.batch, padded.width).gather(1, order)
        return CompactReads(padded.width, slots.flatten(), seen.sum(dim=1, dtype=torch.int32))

    def _plan_prefill(self, window: int) -> PackedReads:
        table = self._table
        counts = [kv_len - first_visible(q_len, kv_len, (window, -1)) for q_len, kv_len in table.shapes]
        first = torch.zeros_like(table.kv_lens)
        if window >= 0:
            first = (table.kv_lens - self._qo_indptr.diff() - window).clamp_(min=0)
        indptr = torch.zeros_like(self._qo_indptr)
        indptr[1:] = (table.kv_lens - first).cumsum(0)
        batch = torch.arange(len(counts), device=table.device)
        request = batch.repeat_interleave(table.kv_lens - first, output_size=sum(counts))
        positions = torch.arange(sum(counts), device=table.device) + (first - indptr[:-1])[request]
        slots, valid = table.lookup(
            positions[:, None], torch.ones_like(positions, dtype=torch.bool)[:, None], request
        )
        return PackedReads(slots.flatten(), indptr, max(counts, default=0), not bool(valid.all()))
