"""The decode step as CUDA graphs: one per padded batch size, captured before the first task.

A graph repeats launches with the arguments they were captured with. So the captured step reads the pool's
plan, which has fixed addresses, takes the longest context as its bound, and lets the kernels find the true
lengths on the device: any mix of lengths replays, and nothing is captured while tasks run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from astrai_triton.backend import ATTN_BACKEND, attn_backend, backend_reasons, current_backend
from astrai_triton.backend.fused import is_interpreted
from astrai_triton.cache import Lease, PagePool
from astrai_triton.engine.model import Model
from astrai_triton.errors import UnsupportedCallError

_WARM_UPS = 2


@attrs.frozen(eq=False)
class Captured:
    """A forward that can be repeated on whatever its inputs hold by then."""

    logits: torch.Tensor
    """``[size, vocab]`` float32, overwritten by every replay."""
    replay: Callable[[], None]


Recorder = Callable[[Callable[[], torch.Tensor]], Captured]


class CudaRecorder:
    """Captures forwards in CUDA graphs that share one pool of memory.

    Args:
        device: the CUDA device they run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, forward: Callable[[], torch.Tensor]) -> Captured:
        """Run ``forward`` a few times, then capture it."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            # Kernels compile and libraries allocate on first use, which a capture does not allow.
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    forward()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits = forward()
        return Captured(logits, graph.replay)


class DecodeGraphs:
    """Decode steps of 1 to ``max_batch_size`` tasks, each run as the smallest captured size that holds it.

    Capturing reads and writes no slot of the pool.

    Args:
        model: the decoder; its weights must stay where they are.
        pool: owner of the KV cache and of the plan that the graphs read.
        max_batch_size: the largest size.
        backend: attention backend of the captured steps; it must read nothing back from the device.
        record: makes a forward repeatable; None is a ``CudaRecorder`` on the model's device.

    Raises:
        UnsupportedCallError: ``backend`` cannot run the model's decode attention.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        max_batch_size: int,
        backend: ATTN_BACKEND = ATTN_BACKEND.TRITON,
        record: Recorder | None = None,
    ) -> None:
        self.backend = backend
        self.sizes = padded_sizes(max_batch_size)
        self._model = model
        self._pool = pool
        self._token_ids = torch.zeros(max_batch_size, dtype=torch.int64, device=model.device)
        self._row_idx = torch.arange(max_batch_size, device=model.device)
        record = CudaRecorder(model.device) if record is None else record
        # Largest first: what it needs beside its logits is enough for all the others.
        with torch.inference_mode(), attn_backend(backend):
            self._captured = {size: self._capture(size, record) for size in reversed(self.sizes)}

    @torch.inference_mode()
    def run(self, leases: Sequence[Lease], kv_lens: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
        """Run one row of each lease.

        Args:
            leases: ``[batch]`` open leases, at least one, with slots for ``kv_lens``.
            kv_lens: ``[batch]`` K/V tokens of each, the row's own included; the row is the last.
            token_ids: ``[batch]`` int64, token of each row, on the host or the device.

        Returns:
            Logits ``[batch, vocab]`` float32, valid until the next call.

        Raises:
            ValueError, PageOwnershipError: as ``PagePool.bind_tasks``.
        """
        batch = len(leases)
        size = choose_size(self.sizes, batch)
        self._pool.bind_padded(leases, kv_lens, size)
        # From pageable memory the driver has taken the values before this returns. Rows behind keep the ids
        # of an earlier step, which are as good as any.
        self._token_ids[:batch].copy_(token_ids, non_blocking=True)
        captured = self._captured[size]
        captured.replay()
        return captured.logits[:batch]

    def _capture(self, size: int, record: Recorder) -> Captured:
        self._pool.bind_padded((), (), size)
        cache = self._pool.view_padded(size)
        token_ids, row_idx = self._token_ids[:size], self._row_idx[:size]

        def forward() -> torch.Tensor:
            # On the device, or the host would have to send positions beside the plan.
            positions = (cache.seq_lens.long() - 1).clamp_(min=0)
            return self._model(token_ids, positions, cache, row_idx)

        return record(forward)


def padded_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two below ``max_batch_size``, and itself: 12 gives (1, 2, 4, 8, 12)."""
    return (*(1 << k for k in range((max_batch_size - 1).bit_length())), max_batch_size)


def choose_size(sizes: Sequence[int], batch: int) -> int:
    """The smallest of ascending ``sizes`` that holds ``batch`` rows.

    Raises:
        ValueError: none does.
    """
    size = next((size for size in sizes if size >= batch), None)
    if size is None or batch < 1:
        raise ValueError(f"leases: wanted 1 to {sizes[-1]}, got {batch}")
    return size


def capture_decode(
    model: Model, pool: PagePool, max_batch_size: int, cuda_graphs: bool | None
) -> DecodeGraphs | None:
    """Graphs of the decode step where there can be any.

    Args:
        model: the decoder.
        pool: owner of the KV cache.
        max_batch_size: tasks that run at once.
        cuda_graphs: True must capture, False must not, None captures where it is possible.

    Raises:
        ValueError: ``cuda_graphs`` is True and it is not possible.
    """
    if cuda_graphs is False:
        return None
    reason = why_no_graphs(model.device)
    if reason is None:
        try:
            return DecodeGraphs(model, pool, max_batch_size=max_batch_size)
        except UnsupportedCallError as error:
            reason = error.reason
    if cuda_graphs:
        raise ValueError(f"cuda_graphs: wanted None or False here, got True; {reason}")
    return None


def why_no_graphs(device: torch.device) -> str | None:
    """Why decode cannot be captured for tasks that are submitted as things stand; None when it can."""
    if device.type != "cuda":
        return f"graphs need a CUDA device, the model is on {device}"
    choice = current_backend()
    if choice not in (None, ATTN_BACKEND.TRITON):
        return f"graphs are captured with the backend triton, and {choice.value} was chosen"
    if is_interpreted():
        return "TRITON_INTERPRET=1 runs the kernels on the host"
    return backend_reasons()[ATTN_BACKEND.TRITON.value]
