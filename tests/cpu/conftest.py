"""Sequences that a model is stepped through, with a pool of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from astrai_triton.cache import PagePool
from astrai_triton.cpu import CpuDecoder
from astrai_triton.model import Decoder


class Session:
    """A model over a pool that starts full of NaN: what is read without having been written shows."""

    def __init__(self, model: Decoder | CpuDecoder, sequences: Sequence[Sequence[int]], **sizes: Any) -> None:
        config = model.config
        longest = max(len(tokens) for tokens in sequences)
        pages = sum(-(-len(tokens) // 4) for tokens in sequences)
        defaults = {
            "max_batch_size": len(sequences),
            "max_seq_len": longest,
            "max_step_tokens": sum(len(tokens) for tokens in sequences),
            "page_size": 4,
            "n_tokens": 4 * pages + 8,
        }
        self.model = model
        self.sequences = sequences
        self.pool = PagePool(
            n_layers=config.n_layers,
            n_q_heads=config.n_q_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            **(defaults | sizes),
        )
        self.pool.storage.k_buffer.fill_(torch.nan)
        self.pool.storage.v_buffer.fill_(torch.nan)
        self.leases = [self.pool.open(tokens) for tokens in sequences]
        self.done = [0] * len(sequences)

    def bind(self, counts: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Token ids, positions and cache of a step of ``counts[i]`` more tokens of sequence ``i``."""
        ends = {i: self.done[i] + count for i, count in counts.items()}
        for i, end in ends.items():
            self.pool.extend(self.leases[i], end)
        ids = [token for i, end in ends.items() for token in self.sequences[i][self.done[i] : end]]
        positions = [position for i, end in ends.items() for position in range(self.done[i], end)]
        leases = [self.leases[i] for i in counts]
        cache = self.pool.bind_tasks(leases, list(counts.values()), list(ends.values()))
        return torch.tensor(ids), torch.tensor(positions), cache

    def step(self, counts: dict[int, int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits of such a step, which is then done."""
        ids, positions, cache = self.bind(counts)
        logits = self.model(ids, positions, cache, None if rows is None else torch.tensor(rows))
        for i, count in counts.items():
            self.done[i] += count
        return logits


@pytest.fixture
def open_session() -> Callable[..., Session]:
    """Begin a ``Session``."""
    return Session
