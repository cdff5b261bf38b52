"""Sampling on a CPU, row by row with numpy.

Steps of a batch are tensor operations where a device runs them. On a CPU a row is weighed while it lies in
the cache of one core, what can be drawn is picked out of it by value, and only that is sorted. No operation
is handed to other threads: on a busy machine it takes longer to have them begin than to do their share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from astrai_triton.cpu.rows import MASS_BLOCK, NUMPY, Floats, Ids, Masses, RowOps, find_row_kernels
from astrai_triton.engine.candidates import MASS_ONE
from astrai_triton.engine.params import SamplingParams

# Groups of which each gives its largest logit: the k-th largest of those bounds the k-th largest of all.
_NUM_GROUPS = 1024
# exp of it rounds to a mass of zero, with room for the rounding of scores.
_LEAST_SCORE = -23.0
# A nucleus is sought among this many candidates or fewer, if that can be had.
_FEW = 256
# What a share of the mass is multiplied with where it becomes a bound on logits: scores are float32.
_SLACK = 0.999

_LEAST_FLOAT = float(np.finfo(np.float32).min)

# As bits; a multiple of it is a float32 for 0 and 1.
_MINUS_INFINITY = np.uint32(0xFF800000)


@attrs.frozen
class Cuts:
    """How one row is sampled.

    Attributes:
        scale: one over the temperature; 0 for greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
    """

    scale: float
    top_k: int
    top_p: float
    min_p: float


def make_cuts(params: SamplingParams, vocab_size: int) -> Cuts:
    """What ``params`` mean for a row of ``vocab_size`` logits."""
    return Cuts(
        scale=0.0 if params.is_greedy else 1.0 / params.temperature,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        top_p=params.top_p,
        min_p=params.min_p,
    )


def is_on_host(device: torch.device) -> bool:
    """Whether logits on ``device`` are sampled here."""
    return device.type == "cpu"


def draw_on_host(logits: Tensor, cuts: Sequence[Cuts], noise: Sequence[float]) -> Tensor:
    """Draw one token a row: of each row what the strategies of its cuts would draw, up to rounding.

    Args:
        logits: [B, V] float32 on the CPU, not changed.
        cuts: of each row.
        noise: of each row, in [0, 1 - 2^-52] (see ``noise.uniform``).

    Returns:
        [B] int64; -1 for a row with NaN or +inf, or nothing above -inf.
    """
    sampler = RowSampler(logits.shape[1], find_row_kernels() or NUMPY)
    rows = np.ascontiguousarray(logits.detach().numpy())
    with np.errstate(all="ignore"):
        ids = [sampler.draw(row, cut, u) for row, cut, u in zip(rows, cuts, noise, strict=True)]
    return torch.tensor(ids, dtype=torch.int64)


def select_rows(logits: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [n] of logits [B, V], on any device; on a CPU without a word to other threads."""
    if is_on_host(logits.device):
        return torch.from_numpy(logits.numpy().take(index.numpy(), axis=0))
    return logits.index_select(0, index)


class RowSampler:
    """Weighs and draws rows of logits, one after the other.

    Args:
        vocab_size: of the rows.
        kernels: for what is done with every logit; ``NUMPY`` where there are none.
    """

    def __init__(self, vocab_size: int, kernels: RowOps) -> None:
        self.vocab_size = vocab_size
        self._ops = kernels

    def draw(self, row: Floats, cuts: Cuts, uniform: float) -> int:
        """One id, or -1 as ``draw_on_host`` has it."""
        best = int(row.argmax())
        top = float(row[best])
        # The first NaN is the largest to numpy.
        if not math.isfinite(top):
            return -1
        if not cuts.scale:
            return best
        if cuts.top_k:
            return self._draw_best(row, top, cuts, uniform)
        if cuts.top_p < 1.0:
            return self._draw_nucleus(row, top, cuts, uniform)
        if cuts.min_p > 0.0:
            return self._draw_likely(row, top, cuts, uniform)
        return self._draw_any(row, top, cuts.scale, uniform)

    def _draw_any(self, row: Floats, top: float, scale: float, uniform: float) -> int:
        """From the whole vocabulary, in the order of ids."""
        sums = self._ops.sum_mass(row, top, scale)
        reached = sums.cumsum()
        target = reached[-1] * uniform
        block = int(reached.searchsorted(target, "right"))
        start = block * MASS_BLOCK
        inside = self._ops.weigh(row[start : start + MASS_BLOCK], top, scale).cumsum()
        return start + int(inside.searchsorted(target - (reached[block] - sums[block]), "right"))

    def _draw_likely(self, row: Floats, top: float, cuts: Cuts, uniform: float) -> int:
        """From what has a share of the largest mass, in the order of ids."""
        ids = self._ops.find_large(row, _bound(top, cuts.min_p * _SLACK, cuts.scale))
        mass = self._ops.weigh(row[ids], top, cuts.scale)
        reached = (mass * (mass >= math.ceil(cuts.min_p * MASS_ONE))).cumsum()
        return int(ids[reached.searchsorted(reached[-1] * uniform, "right")])

    def _draw_best(self, row: Floats, top: float, cuts: Cuts, uniform: float) -> int:
        """From the ``top_k`` largest."""
        bound = max(_least_of_best(row, cuts.top_k), _bound(top, 0.0, cuts.scale))
        ranked = _Ranked(row, self._ops.find_large(row, bound), cuts.top_k)
        ranked.weigh(self._ops, top, cuts.scale)
        return ranked.draw(ranked.total * cuts.top_p if cuts.top_p < 1.0 else None, cuts.min_p, uniform)

    def _draw_nucleus(self, row: Floats, top: float, cuts: Cuts, uniform: float) -> int:
        """From the fewest tokens with a share of the whole mass."""
        total = float(self._ops.sum_mass(row, top, cuts.scale).sum())
        wanted = total * cuts.top_p
        ranked = _Ranked(row, self.find_nucleus(row, top, cuts, total))
        ranked.weigh(self._ops, top, cuts.scale)
        if ranked.total < wanted:
            # Rounding, or a share of almost all.
            ranked = _Ranked(row, self._ops.find_large(row, _bound(top, 0.0, cuts.scale)))
            ranked.weigh(self._ops, top, cuts.scale)
        return ranked.draw(wanted, cuts.min_p, uniform)

    def find_nucleus(self, row: Floats, top: float, cuts: Cuts, total: float) -> Ids:
        """Ids that include the nucleus, few where that is easily seen.

        Of n tokens those that are lighter than an n-th of what may be left out can be left out together. That
        is applied to the vocabulary, then to what it leaves.

        Args:
            row: [V].
            top: its largest.
            cuts: with ``top_p`` below 1.
            total: mass of the row.
        """
        spare = total * (1.0 - cuts.top_p)
        num = self.vocab_size
        ids = self._ops.find_large(row, _bound(top, spare / num / MASS_ONE * _SLACK, cuts.scale))
        while _FEW < len(ids) < 0.5 * num:
            num = len(ids)
            logits = row[ids]
            left = total - float(self._ops.weigh(logits, top, cuts.scale).sum())
            ids = ids[logits >= _bound(top, (spare - left) / num / MASS_ONE * _SLACK, cuts.scale)]
        return ids


class _Ranked:
    """Tokens of a row in the order of their logits.

    Args:
        row: [V].
        ids: [n], ascending, with all that are larger than any of them, n > 0.
        num: how many of the best to keep; None is all.
    """

    def __init__(self, row: Floats, ids: Ids, num: int | None = None) -> None:
        self._ids = ids
        self._logits = row[ids]
        self._negated = np.negative(self._logits)
        # Of numbers alone: numpy sorts those with SIMD, and indices not.
        self._negated.sort()
        self._negated = self._negated[:num]
        self._mass: Masses = np.empty(0)
        self._reached: Masses = np.empty(0)

    def weigh(self, kernels: RowOps, top: float, scale: float) -> None:
        """Give them mass, before all else."""
        self._mass = kernels.weigh(np.negative(self._negated), top, scale)
        self._reached = self._mass.cumsum()

    @property
    def total(self) -> float:
        """Mass of all."""
        return float(self._reached[-1])

    def draw(self, wanted: float | None, min_p: float, uniform: float) -> int:
        """One id, from the fewest that have the mass ``wanted`` and of those from the likely ones."""
        num = len(self._mass)
        if wanted is not None:
            num = min(num, int(self._reached.searchsorted(wanted)) + 1)
        if min_p > 0.0:
            num = min(num, int(np.count_nonzero(self._mass >= math.ceil(min_p * MASS_ONE))))
        column = int(self._reached.searchsorted(self._reached[num - 1] * uniform, "right"))
        # Among the ids of equal logits, which are ascending, as many are passed as columns are.
        value = self._negated[column]
        ties = np.flatnonzero(self._logits == -value)
        return int(self._ids[ties[column - int(self._negated.searchsorted(value))]])


def forbid(row: Floats, octets: npt.NDArray[np.uint8]) -> Callable[[], None]:
    """Set the logits of forbidden tokens to -inf; NaN and +inf give NaN, so that they show.

    Args:
        row: [V], written to.
        octets: [ceil(V / 8)] or more; bit i % 8 of octet i // 8: token i may come.

    Returns:
        Puts back what stood there.
    """
    old = row.copy()
    forbidden = np.unpackbits(~octets, count=len(row), bitorder="little").astype(np.uint32)
    # Adding is several times as fast as numpy's filling where a mask is set.
    with np.errstate(invalid="ignore"):
        row += np.multiply(forbidden, _MINUS_INFINITY, out=forbidden).view(np.float32)
    return lambda: row.__setitem__(slice(None), old)


def score_on_host(logits: Tensor, token_ids: Tensor, num_top: int) -> Masses:
    """As ``logprobs.score_tokens``, without its lower bound; ``num_top`` at most V. [R, 1 + 2 * K]."""
    rows = logits.detach().numpy()
    scores = np.full((len(rows), 1 + 2 * num_top), math.nan)
    scores[:, 1 : 1 + num_top] = 0
    exps = np.empty(logits.shape[1])
    with np.errstate(all="ignore"):
        for out, row, token_id in zip(scores, rows, token_ids.numpy(), strict=True):
            top = row[row.argmax()]
            if not math.isfinite(top):
                continue
            np.subtract(row, top, out=exps, dtype=np.float64)
            total = float(np.exp(exps, out=exps).sum())
            ids = find_best(row, num_top) if num_top else np.empty(0, np.intp)
            out[0], out[1 + num_top :] = row[token_id], row[ids]
            out -= float(top)
            out -= math.log(total)
            out[1 : 1 + num_top] = ids
    return scores


def find_best(row: Floats, num: int) -> Ids:
    """Ids of the largest logits, largest first, ties lower id first: those of -inf too.

    Args:
        row: [V], without NaN.
        num: 1 to V.
    """
    ids = np.flatnonzero(row >= max(_least_of_best(row, num), _LEAST_FLOAT))
    if len(ids) < num:
        ids = np.arange(len(row))
    return ids[np.argsort(np.negative(row[ids]), kind="stable")[:num]]


def _least_of_best(row: Floats, num: int) -> float:
    """A bound that at least ``num`` logits reach, and not many more; -inf where none is easily found."""
    num_groups = _NUM_GROUPS if 8 * num <= _NUM_GROUPS else 4 * _NUM_GROUPS
    depth = len(row) // num_groups
    if depth < 2 or 2 * num > num_groups:
        return -math.inf
    # Every so many-th logit is a group, so that numpy compares whole lines.
    largest = row[: depth * num_groups].reshape(depth, num_groups).max(0)
    return float(np.partition(largest, num_groups - num)[num_groups - num])


def _bound(top: float, share: float, scale: float) -> float:
    """A logit, exact in float32, below all whose mass has this share of the largest, <= 1, and is not 0."""
    score = max(math.log(share), _LEAST_SCORE) if share > 0.0 else _LEAST_SCORE
    # Rounded to float32 it passes no float32.
    return float(np.float32(max(top + score / scale, _LEAST_FLOAT)))
