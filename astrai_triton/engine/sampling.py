"""The sampler: one token for every row of a batch, whatever mix of parameters the rows ask for."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from astrai_triton.engine.candidates import MAX_SEARCHED, Candidates, take_largest
from astrai_triton.engine.host import draw_on_host, is_on_host, make_cuts, select_rows
from astrai_triton.engine.logprobs import read_score, score_tokens
from astrai_triton.engine.noise import uniform
from astrai_triton.engine.params import SamplingParams, check_vocab
from astrai_triton.engine.strategies import (
    BaseSamplingStrategy,
    EditStrategy,
    GrammarStrategy,
    LogitBiasStrategy,
    MinPStrategy,
    PenaltyStrategy,
    TemperatureStrategy,
    TopKStrategy,
    TopPStrategy,
)
from astrai_triton.errors import GrammarError

if TYPE_CHECKING:
    from astrai_triton.grammar.matcher import GrammarMatcher

__all__ = [
    "BaseSamplingStrategy",
    "GrammarStrategy",
    "LogitBiasStrategy",
    "MinPStrategy",
    "PenaltyStrategy",
    "SampleRow",
    "SampledToken",
    "SamplingPipeline",
    "TemperatureStrategy",
    "TopKStrategy",
    "TopPStrategy",
    "check_vocab",
    "sample",
]

_NO_COUNTS: Mapping[int, int] = MappingProxyType({})


@attrs.define(eq=False)
class SampleRow:
    """What the sampler must know of one task.

    Attributes:
        params: how to sample.
        seed: any integer; the lowest 64 bits count.
        position: index of the sampled token in the task's tokens. (seed, position) determines the noise.
        counts: generated token id -> occurrences; read only when ``params`` has a penalty.
        suppressed: ids that must not be drawn now, for ``min_tokens``. With a matcher they may be, where it
            allows nothing else.
        matcher: says which tokens may come; None: all.
    """

    params: SamplingParams
    seed: int
    position: int
    counts: Mapping[int, int] = _NO_COUNTS
    suppressed: Sequence[int] = ()
    matcher: GrammarMatcher | None = None


@attrs.frozen
class SampledToken:
    """One token drawn.

    Attributes:
        token_id: -1 when the row held NaN or +inf, or nothing above -inf.
        logprob: natural log of its probability under the logits as they came in, at least -9999.0; None
            unless asked for.
        top: the most likely tokens under those logits, ``(token id, logprob)`` each, as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Route(enum.Enum):
    """What a row costs. Rows of one route are sampled together."""

    LARGEST = enum.auto()  # Greedy: two argmax over blocks.
    SEARCHED = enum.auto()  # A small top-k: all else happens on k columns.
    SORTED = enum.auto()  # A large top-k, or top-p over the whole vocabulary.
    FREE = enum.auto()  # The whole vocabulary but for min-p: nothing needs an order.


class SamplingPipeline(BaseSamplingStrategy):
    """Composes the steps of the sampler, and runs those that the tasks of an engine step ask for.

    Args:
        strategies: steps of :meth:`apply` and :meth:`draw`, in order. :meth:`__call__` applies them to each
            batch, before the steps its rows ask for.
    """

    def __init__(self, strategies: Sequence[BaseSamplingStrategy] = ()) -> None:
        self._strategies = tuple(strategies)

    @property
    def is_plain(self) -> bool:
        """Whether there are no steps but those that the rows ask for."""
        return not self._strategies

    def narrow(self, candidates: Candidates) -> None:
        """Run all steps."""
        for strategy in self._strategies:
            strategy.narrow(candidates)

    @torch.no_grad()
    def draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Run all steps and draw one token a row.

        Args:
            logits: [B, V] floating point, not changed.
            noise: [B] float64, each in [0, 1 - 2^-52] (see ``noise.uniform``).

        Returns:
            [B] int64; -1 for a row with NaN or +inf, or nothing above -inf. Nothing is read from the device.
        """
        candidates = Candidates(logits.float())
        self.narrow(candidates)
        ids = candidates.draw(noise.unsqueeze(1))
        return _mark_invalid(ids, candidates.top())

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Sample the next token of each task.

        Penalties, logit bias, suppressed ids, grammar, temperature, top-k, top-p, min-p, draw: in this order.
        The result of a row is a function of its logits and its :class:`SampleRow` alone, bit for bit. Reads
        the device once.

        Args:
            logits: [B, V] float32. Written to in between, but on return as it was.
            rows: one for each row of logits.

        Raises:
            ValueError: as many rows as logits were wanted.
            GrammarError: a row's grammar allows no token.
        """
        if logits.ndim != 2 or len(logits) != len(rows):
            raise ValueError(
                f"rows: wanted one for each row of logits {tuple(logits.shape)}, got {len(rows)}"
            )
        if not rows:
            return []
        if self._strategies:
            logits = self.apply(logits)
        edits = build_edits(
            [row.params for row in rows],
            [row.counts if row.params.has_penalties else _NO_COUNTS for row in rows],
            [row.suppressed if row.matcher is None else () for row in rows],
        )
        constrained = [row_idx for row_idx, row in enumerate(rows) if row.matcher is not None]
        if constrained:
            masks = _build_masks([rows[row_idx] for row_idx in constrained], logits.shape[1])
            edits.append(GrammarStrategy(masks, constrained))
        undo = [edit.edit_(logits) for edit in edits]
        ids = _draw_rows(logits, rows)
        for restore in reversed(undo):
            restore()
        return _read_tokens(logits, ids, rows)


@torch.no_grad()
def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Draw one token for every row of logits, all with the same parameters.

    Args:
        logits: [B, V] floating point, not changed.
        temperature: 0 to 2; below 1e-5 greedy.
        top_k: 0 or -1 is off.
        top_p: 0 to 1; 0 keeps one token.
        min_p: 0 to 1.
        seed: row i draws with noise (seed, i); None takes a seed from torch's global generator.

    Returns:
        [B] int64 on the device of ``logits``; -1 for a row with NaN or +inf, or nothing above -inf.

    Raises:
        TypeError, ValueError: a parameter of the wrong type or out of range, or logits that are not 2-D.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits: wanted [batch, vocabulary], got shape {tuple(logits.shape)}")
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if seed is None:
        # On the CPU: waits for no device.
        seed = int(torch.randint(2**62, ()))
    rows = [SampleRow(params, seed, position) for position in range(len(logits))]
    return _draw_rows(logits.float(), rows)


def build_edits(
    params: Sequence[SamplingParams],
    counts: Sequence[Mapping[int, int]] | None,
    suppressed: Sequence[Sequence[int]] | None,
) -> list[EditStrategy]:
    """The steps that edit single logits, if any row asks for them.

    Args:
        params: one for each row.
        counts: generated token id -> occurrences, of each row; None: no row has penalties.
        suppressed: ids that must not be drawn now, of each row; None is none.
    """
    edits: list[EditStrategy] = []
    if counts is not None and any(counts):
        edits.append(
            PenaltyStrategy(
                counts,
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.repetition_penalty for p in params],
            )
        )
    biases = [p.logit_bias for p in params]
    if suppressed is not None and any(suppressed):
        biases = [
            {**bias, **dict.fromkeys(ids, -math.inf)} if ids else bias
            for bias, ids in zip(biases, suppressed, strict=True)
        ]
    if any(biases):
        edits.append(LogitBiasStrategy(biases))
    return edits


def choose_route(params: SamplingParams, vocab_size: int) -> Route:
    if params.is_greedy:
        return Route.LARGEST
    has_top_k = 0 < params.top_k < vocab_size
    if has_top_k and params.top_k <= MAX_SEARCHED:
        return Route.SEARCHED
    return Route.SORTED if has_top_k or params.top_p < 1.0 else Route.FREE


def _draw_rows(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """One id a row, [B] int64 or -1. A vectorised pass for each route taken, four at most; no device read.

    On a CPU rows are drawn one by one.
    """
    if is_on_host(logits.device):
        cuts = [make_cuts(row.params, logits.shape[1]) for row in rows]
        return draw_on_host(logits, cuts, [uniform(row.seed, row.position) for row in rows])
    routes: dict[Route, list[int]] = {}
    for row_idx, row in enumerate(rows):
        routes.setdefault(choose_route(row.params, logits.shape[1]), []).append(row_idx)
    if len(routes) == 1:
        return _draw_route(next(iter(routes)), logits, rows)
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for route, members in routes.items():
        index = torch.tensor(members, device=logits.device)
        ids[index] = _draw_route(route, logits.index_select(0, index), [rows[row_idx] for row_idx in members])
    return ids


def _draw_route(route: Route, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """One id a row for rows of one route, [B] int64 or -1."""
    if route is Route.LARGEST:
        return draw_largest(logits)
    noise = torch.tensor([uniform(row.seed, row.position) for row in rows], dtype=torch.float64)
    return build_steps(route, [row.params for row in rows]).draw(logits, noise.to(logits.device))


def draw_largest(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, [B] int64 or -1."""
    ids, top = take_largest(logits)
    return _mark_invalid(ids, top)


def build_steps(route: Route, params: Sequence[SamplingParams]) -> SamplingPipeline:
    """What rows of one route, that of greedy rows apart, pass through."""
    steps: list[BaseSamplingStrategy] = []
    if any(p.temperature != 1.0 for p in params):
        steps.append(TemperatureStrategy([p.temperature for p in params]))
    if route is not Route.FREE:
        steps.append(TopKStrategy([p.top_k for p in params]))
    if any(p.top_p < 1.0 for p in params):
        steps.append(TopPStrategy([p.top_p for p in params]))
    if any(p.min_p > 0.0 for p in params):
        steps.append(MinPStrategy([p.min_p for p in params]))
    return SamplingPipeline(steps)


def _mark_invalid(ids: Tensor, top: Tensor) -> Tensor:
    """Ids [B] from a column, -1 where the row's largest logit is NaN or infinite."""
    return torch.where(top.abs() < math.inf, ids, -1).squeeze(1)


def _build_masks(rows: Sequence[SampleRow], vocab_size: int) -> npt.NDArray[np.int32]:
    """What the grammars of the rows allow next, [R, ceil(V / 32)]; see ``GrammarStrategy``."""
    masks = np.zeros((len(rows), -(-vocab_size // 32)), dtype="<i4")
    for mask, row in zip(masks, rows, strict=True):
        assert row.matcher is not None
        row.matcher.fill_mask(mask)
        if not mask.any():
            raise GrammarError("grammar: wanted a token that may come next, the vocabulary has none")
        if row.suppressed:
            _suppress(mask, row.suppressed)
    return masks


def _suppress(mask: npt.NDArray[np.int32], token_ids: Sequence[int]) -> None:
    """Forbid tokens in a mask [ceil(V / 32)], unless nothing would be left."""
    rest = mask.copy()
    for token_id in token_ids:
        rest[token_id // 32] &= ~np.left_shift(1, token_id % 32, dtype=np.int32)
    if rest.any():
        mask[:] = rest


def _read_tokens(logits: Tensor, ids: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Bring ids [B], and what was asked of the logits [B, V] beside them, to the host in one read."""
    asked = [
        [row_idx for row_idx, row in enumerate(rows) if row.params.logprobs and not row.params.top_logprobs],
        [row_idx for row_idx, row in enumerate(rows) if row.params.top_logprobs],
    ]
    groups = [members for members in asked if members]
    if not groups:
        return [SampledToken(token_id) for token_id in ids.tolist()]
    scores = [_score_rows(logits, ids, rows, members) for members in groups]
    # Ids are far below 2^53: exact as float64, so that one tensor carries all.
    packed = torch.cat((ids.double(), *(score.flatten() for score in scores))).tolist()
    tokens = [SampledToken(int(token_id)) for token_id in packed[: len(rows)]]
    start = len(rows)
    for members, score in zip(groups, scores, strict=True):
        for row_idx in members:
            end = start + score.shape[1]
            if tokens[row_idx].token_id >= 0:
                logprob, top = read_score(packed[start:end], rows[row_idx].params.top_logprobs)
                tokens[row_idx] = SampledToken(tokens[row_idx].token_id, logprob, top)
            start = end
    return tokens


def _score_rows(logits: Tensor, ids: Tensor, rows: Sequence[SampleRow], members: Sequence[int]) -> Tensor:
    """``score_tokens`` of some rows, with as many alternatives as any of them wants."""
    if len(members) < len(rows):
        index = torch.tensor(members, device=logits.device)
        logits, ids = select_rows(logits, index), ids.index_select(0, index)
    num_top = max(rows[row_idx].params.top_logprobs for row_idx in members)
    # A row that is not finite has no id; what is computed for it is not read.
    return score_tokens(logits, ids.clamp(min=0), num_top)
