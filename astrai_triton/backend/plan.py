"""Which slots one step of the torch backend reads, and which of them each row sees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import torch

from astrai_triton.backend.dense import KEY_BLOCK, Visibility, first_visible, geometry_keep
from astrai_triton.backend.slots import SlotTable
from astrai_triton.kvcache import KVCache

_VECTOR = 16


def padded_width(num_keys: int) -> int:
    """Keys that decode reads for each request of a batch whose longest has ``num_keys``.

    Masked keys at the end add exact zeros, so a request's bits are the same under every width for which torch
    sums in the same order: whole vectors, and beyond 256 keys whole blocks, since BLAS splits longer sums as
    it sees fit.
    """
    step = _VECTOR if num_keys <= KEY_BLOCK else KEY_BLOCK
    return -(-num_keys // step) * step


@attrs.frozen(eq=False)
class Reads:
    """Slots that hold the keys of ``batch`` requests of equal shape, and which of them each row sees."""

    first_row: int
    """First packed row of these requests."""
    batch: int
    q_len: int
    width: int
    """Keys read per request."""
    slots: torch.Tensor
    """``[batch * width]`` int64, every one of them readable."""
    visible: Visibility
    keys: torch.Tensor
    """``[batch * width, Hkv, D]`` scratch that every layer of the step gathers into: taken anew for each
    layer, that much memory may cost more page faults than the copy."""
    values: torch.Tensor
    """``[batch * width, Hkv, Dv]`` scratch."""

    def gather(self, k_layer: torch.Tensor, v_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[batch, width, Hkv, ...]`` of layers ``[size, Hkv, ...]``, valid until the next call."""
        torch.index_select(k_layer, 0, self.slots, out=self.keys)
        torch.index_select(v_layer, 0, self.slots, out=self.values)
        shape = (self.batch, self.width)
        return self.keys.view(*shape, *k_layer.shape[1:]), self.values.view(*shape, *v_layer.shape[1:])


class StepPlan:
    """The reads and writes of one step, found once and shared by its layers.

    Args:
        cache: the step's cache; not kept.
        may_read: see ``SlotTable``.
    """

    def __init__(self, cache: KVCache, may_read: bool) -> None:
        self.table = SlotTable(cache, may_read)
        self._kv_indptr = cache.kv_indptr
        self._context = cache.req_to_token.shape[1]
        self._head_shapes = (cache.k_buffer.shape[2:], cache.v_buffer.shape[2:])
        self._decode: dict[int, Reads] = {}
        self._prefill: dict[tuple[bool, int, int], tuple[Reads, ...]] = {}
        self.writes = self.table.plan_writes(cache.out_cache_loc)

    def decode_reads(self, window: int, attn_mask: torch.Tensor | None = None) -> Reads:
        """Keys of one row per request.

        Args:
            window: keys before the row's own that it sees; -1 is all.
            attn_mask: ``[sum of kv_len]`` bool or None.
        """
        if attn_mask is not None:
            return self._plan_decode(window, attn_mask)
        reads = self._decode.get(window)
        if reads is None:
            reads = self._decode[window] = self._plan_decode(window, None)
        return reads

    def prefill_reads(
        self, is_causal: bool, window_size: tuple[int, int], attn_mask: torch.Tensor | None = None
    ) -> tuple[Reads, ...]:
        """Keys of ragged rows; neighbours of equal shape share one entry, requests without rows have none.

        Args:
            is_causal: bottom-right aligned.
            window_size: (left, right), -1 unbounded.
            attn_mask: ``[sum of q_len * kv_len]`` bool or None.
        """
        if attn_mask is not None:
            return tuple(self._plan_prefill(is_causal, window_size, attn_mask))
        key = (is_causal, *window_size)
        reads = self._prefill.get(key)
        if reads is None:
            reads = self._prefill[key] = tuple(self._plan_prefill(is_causal, window_size, None))
        return reads

    def _plan_decode(self, window: int, attn_mask: torch.Tensor | None) -> Reads:
        table = self.table
        batch, device = len(table.shapes), table.device
        span = table.max_len if window < 0 else min(table.max_len, window + 1)
        width = padded_width(span)
        if batch == 0 or width == 0:
            return self._reads(0, batch, 1, torch.empty(0, dtype=torch.long, device=device), Visibility())
        steps = torch.arange(width, device=device)
        kv_lens = table.kv_lens[:, None]
        positions = (kv_lens - span).clamp(min=0) + steps if window >= 0 else steps.expand(batch, width)
        wanted = (positions < kv_lens) & (steps < span)
        positions = positions.clamp(max=self._context - 1)
        slots, keep = table.lookup(positions, wanted)
        if attn_mask is not None and attn_mask.numel():
            scores = (self._kv_indptr[:-1, None] + positions).clamp(max=attn_mask.shape[0] - 1)
            keep = keep & attn_mask[scores]
        return self._reads(0, batch, 1, table.redirect(slots, keep), self._visible(keep[:, None]))

    def _plan_prefill(
        self, is_causal: bool, window_size: tuple[int, int], attn_mask: torch.Tensor | None
    ) -> Iterator[Reads]:
        request = row = score = 0
        for (q_len, kv_len), run in itertools.groupby(self.table.shapes):
            batch = sum(1 for _ in run)
            mask = None
            if attn_mask is not None:
                num_scores = batch * q_len * kv_len
                mask = attn_mask[score : score + num_scores].view(batch, q_len, kv_len)
                score += num_scores
            if q_len:
                requests = slice(request, request + batch)
                slots, visible = self._plan_run(requests, q_len, kv_len, is_causal, window_size, mask)
                yield self._reads(row, batch, q_len, slots, visible)
            request += batch
            row += batch * q_len

    def _plan_run(
        self,
        requests: slice,
        q_len: int,
        kv_len: int,
        is_causal: bool,
        window_size: tuple[int, int],
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Visibility]:
        """Slots ``[batch * keys]`` of requests of equal shape, and what their rows see."""
        table = self.table
        device = table.device
        first = first_visible(q_len, kv_len, window_size)
        width = kv_len - first
        if width == 0:
            return torch.empty(0, dtype=torch.long, device=device), Visibility()
        positions = torch.arange(first, kv_len, device=device).expand(requests.stop - requests.start, width)
        slots, keep = table.lookup(positions, torch.ones_like(positions, dtype=torch.bool), requests)
        geometry, square = geometry_keep(q_len, width, is_causal, window_size, device)
        if mask is None and table.may_read and bool(keep.all()):
            visible = (
                Visibility(causal=True)
                if square
                else self._visible(None if geometry is None else geometry[None])
            )
            return slots.flatten(), visible
        if square:
            geometry = torch.ones(q_len, width, dtype=torch.bool, device=device).tril_()
        sees = keep[:, None] if geometry is None else keep[:, None] & geometry
        if mask is not None:
            sees = sees & mask[:, :, first:]
        return table.redirect(slots, sees.any(dim=1)), self._visible(sees)

    def _reads(
        self, first_row: int, batch: int, q_len: int, slots: torch.Tensor, visible: Visibility
    ) -> Reads:
        # Not inference tensors, so that a later layer may also write to them outside of inference mode.
        with torch.inference_mode(mode=False):
            keys, values = (
                torch.empty(slots.shape[0], *shape, dtype=self.table.dtype, device=self.table.device)
                for shape in self._head_shapes
            )
        width = slots.shape[0] // batch if batch else 0
        return Reads(first_row, batch, q_len, width, slots, visible, keys, values)

    def _visible(self, keep: torch.Tensor | None) -> Visibility:
        if keep is None:
            return Visibility()
        every_row_sees = self.table.may_read and bool(keep.any(dim=-1).all())
        return Visibility.of(keep, self.table.dtype, every_row_sees=every_row_sees)
