"""How far the predictions of one model are from those of another: log-likelihood, agreement, divergence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 64
"""Rows of logits that are looked at together: bounds the memory of float64 copies."""


@attrs.define
class Tally:
    """Sums over the tokens of a text, of a model (q) and a reference (p)."""

    num_tokens: int = 0
    nll: float = 0.0
    nll_squares: float = 0.0
    num_agreeing: int = 0
    divergences: list[float] = attrs.field(factory=list)
    """KL(p || q) in nats, a number for each token."""

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Count some rows.

        Args:
            logits: ``[rows, vocab]`` float of the model.
            reference: the same of the reference.
            targets: ``[rows]`` int64, what the text says.
        """
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            q = F.log_softmax(logits[rows].double(), dim=-1)
            p = F.log_softmax(reference[rows].double(), dim=-1)
            nll = -q.gather(1, targets[rows, None]).squeeze(1)
            self.num_tokens += len(nll)
            self.nll += float(nll.sum())
            self.nll_squares += float((nll * nll).sum())
            self.num_agreeing += int((q.argmax(-1) == p.argmax(-1)).sum())
            # Rounding may leave -1e-17 where both are equal.
            self.divergences += ((p.exp() * (p - q)).sum(-1)).clamp_min(0.0).tolist()

    def summarize(self) -> dict[str, float]:
        """Perplexity with its standard error, share of agreeing first choices, divergence in nats."""
        count = self.num_tokens
        mean = self.nll / count
        variance = max(0.0, self.nll_squares / count - mean * mean)
        perplexity = math.exp(mean)
        ordered = sorted(self.divergences)
        return {
            "perplexity": perplexity,
            "perplexity_error": perplexity * math.sqrt(variance / count),
            "top1_agreement": self.num_agreeing / count,
            "kl_mean": sum(ordered) / count,
            "kl_p99": ordered[min(count - 1, math.ceil(0.99 * count) - 1)],
            "kl_max": ordered[-1],
        }


class PrefillDecode:
    """A model with a cache, called like one without: half of the tokens are one prefill, the rest is decoded.

    Args:
        model: what the engine calls: ``(token_ids [T], positions [T], kv_cache)`` gives logits of all rows.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """``[1, n, vocab]`` logits of ``[1, n]`` tokens, at positions that count from 0."""
        from astrai_triton.cache import PagePool

        count, config = token_ids.shape[1], self._model.config
        pool = PagePool(
            n_layers=config.n_layers,
            n_q_heads=config.n_q_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_batch_size=1,
            max_seq_len=count,
            max_step_tokens=count,
            dtype=self._model.dtype,
        )
        lease = pool.open(token_ids[0].tolist())
        assert lease is not None
        prefilled = max(1, count // 2)
        logits = []
        for start, end in [(0, prefilled), *((i, i + 1) for i in range(prefilled, count))]:
            pool.extend(lease, end)
            cache = pool.bind_tasks([lease], [end - start], [end])
            logits.append(self._model(token_ids[0, start:end], positions[0, start:end], cache))
        return torch.cat(logits)[None]


def compute_logits(model: Any, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Predictions for every token of a window but the first.

    Returns:
        ``[n - 1, vocab]`` float32 logits and ``[n - 1]`` int64 targets.
    """
    ids = torch.tensor([window])
    logits = model(ids[:, :-1], torch.arange(len(window) - 1)[None])
    return logits[0], ids[0, 1:]


def compare_models(
    models: dict[str, Any], reference: str, windows: Sequence[Sequence[int]]
) -> Iterator[dict[str, Tally]]:
    """Run all models over the windows; yields the tallies so far after each.

    Args:
        models: name -> callable ``(token_ids [1, n], positions [1, n]) -> logits [1, n, vocab]``.
        reference: the name of one of them.
        windows: token ids, at least two each.
    """
    tallies = {name: Tally() for name in models}
    for window in windows:
        expected, targets = compute_logits(models[reference], window)
        for name, model in models.items():
            logits = expected if name == reference else compute_logits(model, window)[0]
            tallies[name].add(logits, expected, targets)
        yield tallies
