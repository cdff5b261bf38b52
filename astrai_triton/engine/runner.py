"""Tasks in, sampled tokens out: builds the ragged batch of one forward and runs the model on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import attrs
import numpy as np
import numpy.typing as npt
import torch

from astrai_triton.backend import ATTN_BACKEND, attn_backend
from astrai_triton.cache import Lease, PagePool
from astrai_triton.engine.batch import DecodeBatch
from astrai_triton.engine.graphs import DecodeGraphs
from astrai_triton.engine.model import Model
from astrai_triton.engine.result import TokenLogprob
from astrai_triton.engine.sampling import SampledToken, SamplingPipeline
from astrai_triton.engine.scoring import score_rows
from astrai_triton.engine.task import Task


@attrs.frozen(eq=False)
class Chunk:
    """The next ``length`` tokens of a task, to be run through the model in this step."""

    task: Task
    length: int

    @property
    def end(self) -> int:
        """Tokens of the task in the cache once this chunk has run."""
        return self.task.num_computed + self.length

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.end == len(self.task.tokens)

    @property
    def scored(self) -> range:
        """Positions whose logits the task wants for the scores of its prompt."""
        scores = self.task.prompt_scores
        return range(0) if scores is None else scores.select_rows(self.task.num_computed, self.end)


@attrs.frozen(eq=False)
class Outcome:
    """What came of a chunk."""

    chunk: Chunk
    token: SampledToken | None
    """Sampled after it; None where it is not the last."""
    scores: list[TokenLogprob]
    """Of the prompt tokens that follow the positions ``chunk.scored``."""


class ModelRunner:
    """Runs chunks of tasks through the model as one ragged forward and samples where a chunk reaches the end.

    Args:
        model: the decoder.
        pool: owner of the KV cache.
        sampler: the sampling pipeline.
        graphs: captured decode steps; None runs every step launch by launch.
    """

    def __init__(
        self, model: Model, pool: PagePool, sampler: SamplingPipeline, graphs: DecodeGraphs | None = None
    ) -> None:
        self.model = model
        """Replaced between steps only."""
        self._pool = pool
        self._sampler = sampler
        self._graphs = graphs
        self._row_idx = torch.arange(pool.workspace.max_batch_size, device=model.device)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.model.config.vocab_size

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.model.device

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        """Forward ``chunks`` (all of one attention backend), sample after those that are last, score prompts.

        Every task must hold slots for ``chunk.end`` tokens. Advances no task: a call that raises can be
        repeated.

        Returns:
            One outcome per chunk, in order.

        Raises:
            NonFiniteLogitsError: a prompt token cannot be scored.
        """
        leases: list[Lease] = []
        for chunk in chunks:
            if chunk.task.lease is None:
                raise ValueError(
                    f"chunks: wanted tasks that hold a lease, task {chunk.task.handle.id} has none"
                )
            leases.append(chunk.task.lease)
        logits = self._replay(chunks, leases)
        if logits is None:
            logits = self._forward(chunks, leases)
        rows = [chunk.task.sample_row() for chunk in chunks if chunk.is_last]
        sampled = iter(self._sampler(logits[: len(rows)], rows) if rows else ())
        scores = score_chunks(logits[len(rows) :], chunks)
        return [
            Outcome(chunk, next(sampled) if chunk.is_last else None, scored)
            for chunk, scored in zip(chunks, scores, strict=True)
        ]

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch) -> tuple[torch.Tensor, list[int], list[SampledToken] | None]:
        """Run and sample one token of every task of ``batch``, whose leases have slots for it.

        Advances nothing: a call that raises can be repeated.

        Returns:
            The sampled ids ``[B]`` on the device and on the host, and all else that is known of them; None
            where that is nothing.
        """
        logits = self._decode_logits(batch)
        if batch.plan is not None and self._sampler.is_plain:
            ids = batch.plan.draw(logits, batch.kv_lens)
            return ids, ids.tolist(), None
        sampled = self._sampler(logits, [task.sample_row() for task in batch.tasks])
        host_ids = [token.token_id for token in sampled]
        return torch.tensor(host_ids, dtype=torch.int64, device=self.model.device), host_ids, sampled

    def _decode_logits(self, batch: DecodeBatch) -> torch.Tensor:
        graphs = self._graphs
        if graphs is not None and batch.backend in (None, graphs.backend):
            return graphs.run(batch.leases, batch.kv_lens.tolist(), batch.token_ids)
        kv_cache = self._pool.bind_decode(batch.rows, batch.kv_lens)
        row_idx = self._row_idx[: len(batch.rows)]
        with attn_backend(batch.backend) if batch.backend is not None else nullcontext():
            return self.model(batch.token_ids, self._to_device(batch.kv_lens - 1), kv_cache, row_idx)

    def _replay(self, chunks: Sequence[Chunk], leases: Sequence[Lease]) -> torch.Tensor | None:
        """Logits of a decode step from a captured graph; None when it is no such step."""
        graphs = self._graphs
        if graphs is None or chunks[0].task.backend not in (None, graphs.backend):
            return None
        if not all(chunk.length == 1 and chunk.is_last for chunk in chunks):
            return None
        token_ids = torch.tensor([chunk.task.tokens[-1] for chunk in chunks], dtype=torch.int64)
        return graphs.run(leases, [chunk.end for chunk in chunks], token_ids)

    def _forward(self, chunks: Sequence[Chunk], leases: Sequence[Lease]) -> torch.Tensor:
        """Logits of the last row of each last chunk, then those of all rows to be scored."""
        q_lens = [chunk.length for chunk in chunks]
        kv_cache = self._pool.bind_tasks(leases, q_lens, [chunk.end for chunk in chunks])
        token_ids, positions, logits_rows = _pack_rows(chunks)
        backend = chunks[0].task.backend
        with attn_backend(backend) if backend is not None else nullcontext():
            return self.model(
                self._to_device(token_ids), self._to_device(positions), kv_cache, self._to_device(logits_rows)
            )

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)


def _pack_rows(
    chunks: Sequence[Chunk],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Token ids ``[T]``, positions ``[T]`` and the rows to give logits for ``[R]``: the last one of each last
    chunk, then those to be scored."""
    token_ids: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    scored_rows: list[int] = []
    for chunk in chunks:
        start, end = chunk.task.num_computed, chunk.end
        scored_rows.extend(len(token_ids) + position - start for position in chunk.scored)
        token_ids.extend(chunk.task.tokens[start:end])
        positions.extend(range(start, end))
        if chunk.is_last:
            last_rows.append(len(token_ids) - 1)
    return (
        np.array(token_ids, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(last_rows + scored_rows, dtype=np.int64),
    )


def score_chunks(logits: torch.Tensor, chunks: Sequence[Chunk]) -> Iterator[list[TokenLogprob]]:
    """Scores that each chunk gives its prompt, from the logits of all rows to be scored ``[R, vocab]``."""
    first = 0
    for chunk in chunks:
        scored = chunk.scored
        rows = logits[first : first + len(scored)]
        first += len(scored)
        following = chunk.task.tokens[scored.start + 1 : scored.stop + 1]
        yield score_rows(rows, following, chunk.task.params.top_logprobs) if scored else []


def group_by_backend(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks of one attention backend each: what one forward can run."""
    groups: dict[ATTN_BACKEND | None, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.task.backend, []).append(chunk)
    return list(groups.values())
