"""The K and V tensors, and the table that maps a task's positions to their slots."""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np
import numpy.typing as npt
import torch

from astrai_triton.errors import CacheError

Int32Array = npt.NDArray[np.int32]

_HUGE_PAGE, _MADV_HUGEPAGE = 2 << 20, 14

MAX_SLOTS = 2**31 - 1
"""Slots are int32."""


class KVStorage:
    """K and V of every slot in every layer, zero at first.

    Args:
        size: slots, 1 to ``MAX_SLOTS``.
        n_layers: layers, >= 1.
        n_kv_heads: key and value heads, >= 1.
        head_dim: elements of a head, >= 1.
        dtype: element type of both tensors.
        device: where they live.

    Raises:
        ValueError: a size is out of range.
        CacheError: the device has not that much memory.
    """

    def __init__(
        self,
        size: int,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= size <= MAX_SLOTS:
            raise ValueError(f"size: wanted 1 to {MAX_SLOTS} slots, got {size}")
        for name, value in (("n_layers", n_layers), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name}: wanted >= 1, got {value}")
        self.size = size
        shape = (n_layers, size, n_kv_heads, head_dim)
        self.num_bytes = 2 * n_layers * size * n_kv_heads * head_dim * dtype.itemsize
        """Bytes of K and V together."""
        device = torch.device(device)
        need = (
            f"a KV cache of n_tokens={size} needs {self.num_bytes} bytes ({self.num_bytes / 2**30:.1f} GiB)"
        )
        remedy = "lower n_tokens, or max_batch_size * max_seq_len in contiguous mode"
        # The kernel would grant more than there is and end the process when the pages are touched.
        if device.type == "cpu" and self.num_bytes > (memory := _physical_memory()):
            raise CacheError(f"{need}, the machine has {memory / 2**30:.1f} GiB of memory; {remedy}")
        try:
            self.k_buffer = _make_zeros(shape, dtype, device)
            self.v_buffer = _make_zeros(shape, dtype, device)
        except (MemoryError, RuntimeError) as error:
            raise CacheError(f"{need}, which {device} refused; {remedy}") from error


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, on huge pages where the system has them: attention reads a little of each of very many pages."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and sys.platform == "linux":
        first = -(-buffer.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        count = buffer.data_ptr() + buffer.nbytes - first
        if count >= _HUGE_PAGE:
            # Advice: a system that does not take it runs on as before.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(count), _MADV_HUGEPAGE)
    return buffer.zero_()


class ReqToTokenPool:
    """Position -> slot, one row per running task.

    ``table`` is the host's copy and the one that is written. On a CPU ``req_to_token`` is the same memory.
    Elsewhere changed positions are remembered until ``take_updates`` hands them over for one indexed copy per
    step.

    Args:
        num_reqs: rows, >= 1.
        max_ctx_len: positions per row, >= 1.
        device: where ``req_to_token`` lives.
        staged: keep ``req_to_token`` apart from ``table``; None does so everywhere but on a CPU.

    Raises:
        ValueError: a size is below 1, or rows times positions exceeds int32.
    """

    def __init__(
        self,
        num_reqs: int,
        max_ctx_len: int,
        device: torch.device | str = "cpu",
        *,
        staged: bool | None = None,
    ) -> None:
        if num_reqs < 1 or max_ctx_len < 1:
            raise ValueError(f"num_reqs, max_ctx_len: wanted >= 1, got {num_reqs}, {max_ctx_len}")
        if num_reqs * max_ctx_len > MAX_SLOTS:
            raise ValueError(
                f"num_reqs * max_ctx_len: wanted at most {MAX_SLOTS}, got {num_reqs * max_ctx_len}; "
                "lower max_batch_size or max_seq_len"
            )
        device = torch.device(device)
        self.num_reqs = num_reqs
        self.max_ctx_len = max_ctx_len
        self.staged = device.type != "cpu" if staged is None else staged
        self.table: Int32Array = np.full((num_reqs, max_ctx_len), -1, dtype=np.int32)
        """``[num_reqs, max_ctx_len]``; -1 where a position has no slot."""
        if self.staged:
            self.req_to_token = torch.full((num_reqs, max_ctx_len), -1, dtype=torch.int32, device=device)
        else:
            self.req_to_token = torch.from_numpy(self.table)
        self._dirty: dict[int, tuple[int, int]] = {}

    def write(self, row: int, start: int, slots: Int32Array) -> None:
        """Give positions from ``start`` on their slots; those beyond the end of the row are left out."""
        end = min(start + slots.size, self.max_ctx_len)
        self.table[row, start:end] = slots[: end - start]
        if self.staged:
            first, last = self._dirty.get(row, (start, end))
            self._dirty[row] = (min(first, start), max(last, end))

    def fill_linear(self) -> None:
        """Give every position the slot ``row * max_ctx_len + position``."""
        self.table[:] = np.arange(self.table.size, dtype=np.int32).reshape(self.table.shape)
        if self.staged:
            self._dirty.clear()
            self.req_to_token.copy_(torch.from_numpy(self.table))

    def clear(self, row: int) -> None:
        """Mask a whole row."""
        self.table[row] = -1
        if self.staged:
            self._dirty.pop(row, None)
            self.req_to_token[row].fill_(-1)

    def take_updates(self) -> tuple[Int32Array, Int32Array]:
        """Hand over what has changed since the last call.

        Returns:
            ``index [changed]``, ``row * max_ctx_len + position``, and ``slots [changed]``; both empty if the
            device sees the table itself.
        """
        if not self._dirty:
            return _NOTHING, _NOTHING
        width = self.max_ctx_len
        spans = [
            np.arange(row * width + a, row * width + b, dtype=np.int32) for row, (a, b) in self._dirty.items()
        ]
        self._dirty.clear()
        index = np.concatenate(spans)
        return index, self.table.reshape(-1)[index]

    def apply_updates(self, index: torch.Tensor, slots: torch.Tensor) -> None:
        """Write what ``take_updates`` gave.

        Args:
            index: ``[changed]`` int32 on the device.
            slots: ``[changed]`` int32 on the device.
        """
        self.req_to_token.view(-1)[index.long()] = slots

    def check(self) -> None:
        """Assert that the device sees the table, but for pending updates. Reads the device."""
        device_table = self.req_to_token.cpu().numpy()
        for row in range(self.num_reqs):
            same = device_table[row] == self.table[row]
            first, last = self._dirty.get(row, (0, 0))
            same[first:last] = True
            assert same.all(), f"row {row} differs from the host's at positions {np.flatnonzero(~same)}"


_NOTHING: Int32Array = np.empty(0, dtype=np.int32)


def _physical_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
