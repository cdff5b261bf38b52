"""Index tensors and scratch of one step, at addresses that never change."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
import torch

from astrai_triton.cache.storage import MAX_SLOTS, Int32Array, KVStorage, ReqToTokenPool
from astrai_triton.errors import CacheError
from astrai_triton.kvcache import KVCache
from astrai_triton.schedule import build_indptr, build_q_tiles, decode_chunk, max_q_tiles, num_decode_splits

_ALIGNMENT = 32
"""int32 elements, 128 bytes: kernels are specialised on pointer alignment, so all sections have the same."""


@attrs.frozen
class _Section:
    """Where an index tensor lies in the plan, in int32 elements."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@attrs.frozen(eq=False)
class _Stage:
    """A host copy of the plan, and the event after which it may be overwritten."""

    host: torch.Tensor
    plan: Int32Array
    copied: torch.cuda.Event | None


@attrs.frozen(eq=False)
class _BatchViews:
    """The tensors whose length follows from the batch; ``decode_*`` are for one row per request."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor
    decode_loc: torch.Tensor
    decode_qo_indptr: torch.Tensor
    decode_tile_to_batch: torch.Tensor
    decode_tile_to_index: torch.Tensor
    decode_o_part: torch.Tensor
    decode_ml_part: torch.Tensor
    decode_out: torch.Tensor
    decode_q_lens: tuple[int, ...]


class Workspace:
    """The plan of a step, and the scratch of decode attention.

    The plan is one int32 buffer with a fixed place for each index tensor and, at its end, room for changed
    positions of ``req_to_token``. On a CPU it is written in place. Elsewhere it is written on the host and
    brought over by one copy. Under CUDA the host's side is pinned and exists twice, so nothing waits for the
    device unless the host is two plans ahead or more positions changed than there is room for.

    Args:
        max_batch_size: requests in a step, >= 1.
        max_step_tokens: packed rows in a step, >= 1; at least one per request is provided for.
        max_seq_len: K/V tokens of a request, >= 1.
        n_q_heads: query heads, a multiple of ``n_kv_heads``.
        n_kv_heads: key and value heads.
        head_dim: elements of a head.
        dtype: of the model and of K and V.
        device: where the tensors live.
        staged: write the plan on the host first; None does so everywhere but on a CPU.

    Raises:
        ValueError: a size is out of range.
        CacheError: the device has no memory for the scratch.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_step_tokens: int,
        max_seq_len: int,
        n_q_heads: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        staged: bool | None = None,
    ) -> None:
        _check_sizes(max_batch_size, max_step_tokens, max_seq_len, n_q_heads, n_kv_heads)
        device = torch.device(device)
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max(max_step_tokens, max_batch_size)
        self.max_seq_len = max_seq_len
        self.staged = device.type != "cpu" if staged is None else staged
        self._lay_out_plan()
        self._allocate_plan(device)
        splits = num_decode_splits(max_seq_len, decode_chunk(n_q_heads, n_kv_heads, dtype.itemsize))
        shape = (max_batch_size, n_q_heads, splits, head_dim)
        try:
            self._decode_o_part = torch.empty(shape, dtype=torch.float32, device=device)
            self._decode_ml_part = torch.empty((*shape[:3], 2), dtype=torch.float32, device=device)
            self._decode_out = torch.empty((max_batch_size, n_q_heads, head_dim), dtype=dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            raise CacheError(
                f"decode scratch float32 {list(shape)} (batch, heads, splits, head_dim) does not fit on "
                f"{device}; lower max_batch_size or max_seq_len"
            ) from error
        self._batch_views: dict[int, _BatchViews] = {}

    @property
    def plan(self) -> torch.Tensor:
        """The int32 buffer on the device that the index tensors are views of."""
        return self._plan

    def bind(
        self,
        rows: list[int],
        q_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        req_to_token: ReqToTokenPool,
        storage: KVStorage,
    ) -> KVCache:
        """Write the plan of a step.

        Args:
            rows: ``[batch]`` row of each request in ``req_to_token``.
            q_lens: ``[batch]`` rows of each in this step, at least 0; the caller has checked that.
            kv_lens: ``[batch]`` K/V tokens of each with this step's rows, at least q_len; checked likewise.
            req_to_token: position -> slot; its changes are brought to the device.
            storage: K and V.

        Returns:
            Views of the plan, valid until the next bind.

        Raises:
            ValueError: more requests, rows or K/V tokens than the workspace was made for.
        """
        row_array, kv_array = np.array(rows, dtype=np.intp), np.array(kv_lens, dtype=np.intp)
        batch, num_tokens, max_len = len(rows), sum(q_lens), max(kv_lens, default=0)
        if batch and num_tokens == batch and q_lens.count(1) == batch:
            return self.bind_decode(row_array, kv_array, req_to_token, storage)
        self._check_room(batch, num_tokens, max_len)
        stage = self._next_stage()
        _put(stage.plan, self._req_pool_indices, row_array)
        _put(stage.plan, self._seq_lens, kv_array)
        # The leading zero never changes. The sum cannot overflow: max_batch_size * max_seq_len is an int32.
        np.add.accumulate(kv_array, out=stage.plan[self._kv_indptr.start + 1 :][:batch])
        num_tiles = self._put_ragged(stage.plan, row_array, q_lens, kv_array, req_to_token.table)
        if self.staged:
            self._upload(stage, req_to_token)
        views = self._batch_views.get(batch) or self._view_batch(batch)
        return attrs.evolve(
            self._view_decode(views, req_to_token, storage, max_len, kv_lens),
            out_cache_loc=self._view(self._out_cache_loc, num_tokens),
            qo_indptr=views.qo_indptr,
            q_tile_to_batch=self._view(self._q_tile_to_batch, num_tiles),
            q_tile_to_index=self._view(self._q_tile_to_index, num_tiles),
            q_lens=q_lens,
        )

    def bind_decode(
        self,
        rows: npt.NDArray[np.intp],
        kv_lens: npt.NDArray[np.intp],
        req_to_token: ReqToTokenPool,
        storage: KVStorage,
    ) -> KVCache:
        """Write the plan of a decode step: ``bind`` with one row of each request.

        Args, raises:
            As ``bind``; at least one request.
        """
        batch, max_len = len(rows), int(kv_lens.max())
        self._check_room(batch, batch, max_len)
        slots = req_to_token.table[rows, kv_lens - 1]
        stage = self._next_stage()
        _put(stage.plan, self._req_pool_indices, rows)
        _put(stage.plan, self._seq_lens, kv_lens)
        _put(stage.plan, self._out_cache_loc, slots)
        np.add.accumulate(kv_lens, out=stage.plan[self._kv_indptr.start + 1 :][:batch])
        if self.staged:
            self._upload(stage, req_to_token)
        views = self._batch_views.get(batch) or self._view_batch(batch)
        return self._view_decode(views, req_to_token, storage, max_len, tuple(kv_lens.tolist()))

    def view_padded(self, num_rows: int, req_to_token: ReqToTokenPool, storage: KVStorage) -> KVCache:
        """The decode step of ``num_rows`` rows that ``bind_padded`` refills: same tensors, whatever the step.

        What a step knows on the host is its bound here: every request has ``max_seq_len`` K/V tokens.

        Raises:
            ValueError: more rows than the workspace was made for.
        """
        self._check_room(num_rows, num_rows, 0)
        views = self._batch_views.get(num_rows) or self._view_batch(num_rows)
        kv_lens = (self.max_seq_len,) * num_rows
        return self._view_decode(views, req_to_token, storage, self.max_seq_len, kv_lens)

    @staticmethod
    def _view_decode(
        views: _BatchViews,
        req_to_token: ReqToTokenPool,
        storage: KVStorage,
        max_len: int,
        kv_lens: tuple[int, ...],
    ) -> KVCache:
        """A step of one row per request."""
        return KVCache(
            k_buffer=storage.k_buffer,
            v_buffer=storage.v_buffer,
            req_to_token=req_to_token.req_to_token,
            req_pool_indices=views.req_pool_indices,
            seq_lens=views.seq_lens,
            out_cache_loc=views.decode_loc,
            max_len=max_len,
            kv_indptr=views.kv_indptr,
            qo_indptr=views.decode_qo_indptr,
            q_tile_to_batch=views.decode_tile_to_batch,
            q_tile_to_index=views.decode_tile_to_index,
            decode_o_part=views.decode_o_part,
            decode_ml_part=views.decode_ml_part,
            decode_out=views.decode_out,
            q_lens=views.decode_q_lens,
            kv_lens=kv_lens,
        )

    def bind_padded(
        self, rows: list[int], kv_lens: tuple[int, ...], num_rows: int, req_to_token: ReqToTokenPool
    ) -> None:
        """Write the plan of a decode step with ``num_rows - len(rows)`` rows that see and write nothing.

        Args:
            rows: ``[batch]`` row of each request in ``req_to_token``.
            kv_lens: ``[batch]`` K/V tokens of each with this step's row, at least 1; the caller has checked
                that.
            num_rows: at least ``batch``.
            req_to_token: position -> slot; its changes are brought to the device.

        Raises:
            ValueError: fewer rows than requests, or more rows or K/V tokens than there is room for.
        """
        batch = len(rows)
        if num_rows < batch:
            raise ValueError(f"num_rows: wanted at least the {batch} requests, got {num_rows}")
        self._check_room(num_rows, num_rows, max(kv_lens, default=0))
        stage = self._next_stage()
        row_array, kv_array = np.zeros((2, num_rows), dtype=np.intp)
        row_array[:batch], kv_array[:batch] = rows, kv_lens
        slots = np.full(num_rows, -1, dtype=np.intp)
        slots[:batch] = req_to_token.table[row_array[:batch], kv_array[:batch] - 1]
        _put(stage.plan, self._req_pool_indices, row_array)
        _put(stage.plan, self._seq_lens, kv_array)
        _put(stage.plan, self._out_cache_loc, slots)
        np.add.accumulate(kv_array, out=stage.plan[self._kv_indptr.start + 1 :][:num_rows])
        if self.staged:
            self._upload(stage, req_to_token)

    def _check_room(self, batch: int, num_tokens: int, max_len: int) -> None:
        if batch > self.max_batch_size:
            raise ValueError(f"q_lens: wanted at most max_batch_size={self.max_batch_size}, got {batch}")
        if num_tokens > self.max_step_tokens:
            raise ValueError(
                f"q_lens: wanted at most max_step_tokens={self.max_step_tokens} rows, got {num_tokens}; "
                "prefill in smaller chunks"
            )
        if max_len > self.max_seq_len:
            raise ValueError(f"kv_lens: wanted at most max_seq_len={self.max_seq_len}, got {max_len}")

    def _lay_out_plan(self) -> None:
        """Give every index tensor its place, the most it can need."""
        batch, tokens = self.max_batch_size, self.max_step_tokens
        tiles = max_q_tiles(tokens, batch)
        self._plan_size = 0

        def take(size: int) -> _Section:
            section = _Section(self._plan_size, size)
            self._plan_size = -(-section.stop // _ALIGNMENT) * _ALIGNMENT
            return section

        self._req_pool_indices = take(batch)
        self._seq_lens = take(batch)
        self._kv_indptr = take(batch + 1)
        self._qo_indptr = take(batch + 1)
        self._out_cache_loc = take(tokens)
        self._q_tile_to_batch = take(tiles)
        self._q_tile_to_index = take(tiles)
        # Index and slot of every changed position: what a step computes, and one prefix hit of any length.
        self._updates = take(2 * (tokens + self.max_seq_len) if self.staged else 0)

    def _allocate_plan(self, device: torch.device) -> None:
        self._plan = torch.zeros(self._plan_size, dtype=torch.int32, device=device)
        # Of a decode batch these depend on nothing but its size, so they are not part of the plan.
        self._decode_counting = torch.arange(self.max_batch_size + 1, dtype=torch.int32, device=device)
        self._decode_zeros = torch.zeros(self.max_batch_size, dtype=torch.int32, device=device)
        self._counting = np.arange(self.max_step_tokens, dtype=np.intp)
        if not self.staged:
            self._stages = [_Stage(self._plan, self._plan.numpy(), None)]
        elif device.type == "cuda":
            pinned = [torch.zeros(self._plan_size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self._stages = [
                _Stage(host, host.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for host in pinned
            ]
        else:
            host = torch.zeros(self._plan_size, dtype=torch.int32)
            self._stages = [_Stage(host, host.numpy(), None)]
        self._stage_idx = 0

    def _next_stage(self) -> _Stage:
        """Take the host copy that was used longest ago, once the device has it."""
        self._stage_idx = (self._stage_idx + 1) % len(self._stages)
        stage = self._stages[self._stage_idx]
        if stage.copied is not None:
            stage.copied.synchronize()
        return stage

    def _upload(self, stage: _Stage, req_to_token: ReqToTokenPool) -> None:
        """Bring the plan and the changes of ``req_to_token`` to the device in one copy, if they fit."""
        index, slots = req_to_token.take_updates()
        if 2 * index.size > self._updates.size:
            device = self._plan.device
            req_to_token.apply_updates(torch.from_numpy(index).to(device), torch.from_numpy(slots).to(device))
            index, slots = index[:0], slots[:0]
        start, middle, stop = (self._updates.start + k * index.size for k in range(3))
        stage.plan[start:middle] = index
        stage.plan[middle:stop] = slots
        self._plan[:stop].copy_(stage.host[:stop], non_blocking=stage.copied is not None)
        if stage.copied is not None:
            stage.copied.record(torch.cuda.current_stream(self._plan.device))
        if index.size:
            req_to_token.apply_updates(self._plan[start:middle], self._plan[middle:stop])

    def _put_ragged(
        self,
        plan: Int32Array,
        row_array: npt.NDArray[np.intp],
        q_lens: tuple[int, ...],
        kv_array: npt.NDArray[np.intp],
        table: Int32Array,
    ) -> int:
        """Write what depends on the row counts; returns the number of q tiles."""
        q_array = np.array(q_lens, dtype=np.intp)
        qo_indptr = build_indptr(q_array)
        # Row t of request b has position t + (kv_len of b - end of b's rows); both are flat in the table.
        first = row_array * table.shape[1] + kv_array - qo_indptr[1:]
        flat = np.repeat(first, q_array) + self._counting[: qo_indptr[-1]]
        q_tile_to_batch, q_tile_to_index = build_q_tiles(q_array)
        _put(plan, self._qo_indptr, qo_indptr)
        _put(plan, self._out_cache_loc, table.reshape(-1)[flat])
        _put(plan, self._q_tile_to_batch, q_tile_to_batch)
        _put(plan, self._q_tile_to_index, q_tile_to_index)
        return q_tile_to_batch.size

    def _view(self, section: _Section, size: int) -> torch.Tensor:
        return self._plan[section.start : section.start + size]

    def _view_batch(self, batch: int) -> _BatchViews:
        """Make the views of a batch size, once."""
        views = _BatchViews(
            req_pool_indices=self._view(self._req_pool_indices, batch),
            seq_lens=self._view(self._seq_lens, batch),
            kv_indptr=self._view(self._kv_indptr, batch + 1),
            qo_indptr=self._view(self._qo_indptr, batch + 1),
            decode_loc=self._view(self._out_cache_loc, batch),
            decode_qo_indptr=self._decode_counting[: batch + 1],
            decode_tile_to_batch=self._decode_counting[:batch],
            decode_tile_to_index=self._decode_zeros[:batch],
            decode_o_part=self._decode_o_part[:batch],
            decode_ml_part=self._decode_ml_part[:batch],
            decode_out=self._decode_out[:batch],
            decode_q_lens=(1,) * batch,
        )
        self._batch_views[batch] = views
        return views


def _put(plan: Int32Array, section: _Section, values: npt.NDArray[np.signedinteger]) -> None:
    plan[section.start : section.start + values.size] = values


def _check_sizes(batch: int, step_tokens: int, seq_len: int, q_heads: int, kv_heads: int) -> None:
    if min(batch, step_tokens, seq_len) < 1:
        raise ValueError(
            "max_batch_size, max_step_tokens, max_seq_len: wanted >= 1, "
            f"got {batch}, {step_tokens}, {seq_len}"
        )
    if batch * seq_len > MAX_SLOTS:
        raise ValueError(f"max_batch_size * max_seq_len: wanted at most {MAX_SLOTS}, got {batch * seq_len}")
    if min(q_heads, kv_heads) < 1 or q_heads % kv_heads:
        raise ValueError(f"n_q_heads: wanted a multiple of n_kv_heads={kv_heads}, got {q_heads}")
