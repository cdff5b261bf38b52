"""Candidates of a batch: what each row may still draw, in which order and with how much probability.

Probabilities are kept as *mass*: ``exp(score)`` of every candidate, rounded to a whole multiple of 2^-32
of the largest and held in float64. Sums of such masses are exact below 2^53, hence the same in every
order: a row's result cannot depend on how a reduction was laid out for the batch around it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

# Mass of a row's most likely token. With 2^32, 2^21 tokens fit under 2^53.
MASS_ONE = 2.0**32
# Up to here the k best are found by searching blocks; beyond, the whole row is sorted.
MAX_SEARCHED = 512
# Tokens in a block of a two-level search, measured on 49152 logits. For the largest logit, 64 to 512 are
# within 15 %; for the k largest, smaller blocks leave fewer candidates to order.
_BLOCK = 256
_TOP_K_BLOCK = 64


class Candidates:
    """What each row may still draw. The tensors it was made from are never written to.

    At first columns are token ids. After :meth:`order` they are sorted by (logit descending, id ascending),
    and what a row keeps is a prefix of its columns.

    Args:
        logits: [B, V] float32; -inf is out of the running.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._scale: float | Tensor | None = None
        self._top: Tensor | None = None
        self._mass: Tensor | None = None
        self._reached: Tensor | None = None
        self._keep: Tensor | None = None
        self._columns: _Searched | _Sorted | None = None
        self._num_kept: Tensor | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether columns are sorted."""
        return self._columns is not None

    @property
    def logits(self) -> Tensor:
        """[B, C] float32, without the factor owed. Not ordered: -inf is out of the running."""
        if self._keep is not None:
            self._logits = self._logits.masked_fill(self._keep == 0, -math.inf)
            self._keep = None
        return self._logits

    def editable(self) -> Tensor:
        """Put a copy of the logits in their place and give it, [B, V] float32, to be written into at once.

        Raises:
            ValueError: the candidates are ordered.
        """
        if self.is_ordered:
            raise ValueError(
                "logits: wanted the order of ids, got them sorted; edit them before top-k and top-p"
            )
        self._logits = self.logits.clone()
        self._top = self._mass = self._reached = None
        return self._logits

    def rescale(self, factor: float | Tensor) -> None:
        """Owe the logits a factor > 0, a number or [B, 1] float32. It changes no order, so it can wait."""
        self._scale = factor if self._scale is None else self._scale * factor
        self._mass = self._reached = None

    def order(self, num: int | None = None) -> None:
        """Sort the columns; only the ``num`` best need be there afterwards, 1 to V. None is all."""
        if self.is_ordered:
            return
        logits = self.logits
        num = logits.shape[1] if num is None else num
        if num <= MAX_SEARCHED:
            ids, self._logits = _search(logits, num)
            self._columns = _Searched(ids, logits.shape[1])
            self._top = self._logits[:, :1]
        else:
            self._columns, self._logits = _sort(logits)
        self._mass = self._reached = None

    def top(self) -> Tensor:
        """Largest logit of each row, [B, 1] float32; NaN when the row holds one."""
        if self._top is None:
            self._top = self._logits.amax(1, keepdim=True)
        return self._top

    def mass(self) -> Tensor:
        """Probability relative to the most likely token, [B, C] float64 whole numbers, 0 to ``MASS_ONE``."""
        if self._mass is None:
            scores = self.logits - self.top()
            if self._scale is not None:
                scores.mul_(self._scale)
            self._mass = scores.exp_().mul_(MASS_ONE).round_().double()
        return self._mass

    def keep_first(self, num: int | Tensor) -> None:
        """Keep the ``num`` best of ordered candidates, a number or [B, 1] int64, 1 to C."""
        if isinstance(num, int):
            num = torch.full((len(self._logits), 1), num, device=self._logits.device)
        self._num_kept = num if self._num_kept is None else torch.minimum(self._num_kept, num)

    def keep_share(self, share: float | Tensor) -> None:
        """Keep the fewest best ordered candidates with this share of the mass (number or [B, 1] float64)."""
        reached = self._mass_sums()
        num_before = torch.searchsorted(reached, self._kept_mass(reached) * share)
        # Only in a row of NaN can the target be out of reach.
        self.keep_first(num_before.clamp_(max=reached.shape[1] - 1).add_(1))

    def keep_likely(self, ratio: float | Tensor) -> None:
        """Keep what has this ratio, 0 to 1, of the largest mass (number or [B, 1] float64)."""
        bar = ratio * MASS_ONE
        # Masses are whole, so this is 1 where the bar is reached, else 0. Comparing and masking with booleans
        # takes five times as long on a CPU.
        kept = (self.mass() - ((bar.ceil() if isinstance(bar, Tensor) else math.ceil(bar)) - 1)).clamp_(0, 1)
        if self.is_ordered:
            # Only a row of NaN keeps nothing.
            self.keep_first(kept.sum(1, keepdim=True).long().clamp_(min=1))
            return
        self._keep = kept if self._keep is None else self._keep * kept
        self.mass().mul_(kept)

    def draw(self, uniform: Tensor) -> Tensor:
        """Draw one id a row by inverse CDF over the columns.

        Args:
            uniform: [B, 1] float64 in [0, 1 - 2^-52].

        Returns:
            [B, 1] int64.
        """
        if self._columns is not None:
            reached = self._mass_sums()
            return self._columns.find_ids(_count_within(reached, self._kept_mass(reached) * uniform))
        mass = self.mass()
        sums = reduce_blocks(mass, _BLOCK, torch.sum)
        reached = sums.cumsum(1)
        target = self._kept_mass(reached) * uniform
        block = _count_within(reached, target)
        before = reached.gather(1, block) - sums.gather(1, block)
        columns, inside = _expand_blocks(mass, block, _BLOCK, 0.0)
        return columns.gather(1, _count_within(inside.cumsum(1).add_(before), target))

    def to_logits(self) -> Tensor:
        """All logits [B, V] float32, scaled; -inf for what is out of the running."""
        logits = self.logits
        if self._columns is not None:
            if self._num_kept is not None:
                gone = _arange(logits.shape[1], logits.device) >= self._num_kept
                logits = logits.masked_fill(gone, -math.inf)
            logits = self._columns.restore(logits)
        return logits if self._scale is None else logits * self._scale

    def _mass_sums(self) -> Tensor:
        """Running sums of the mass of ordered candidates, [B, C] float64."""
        if self._reached is None:
            self._reached = self.mass().cumsum(1)
        return self._reached

    def _kept_mass(self, reached: Tensor) -> Tensor:
        """Mass of all that is kept, [B, 1], from the running sums [B, C]."""
        return reached[:, -1:] if self._num_kept is None else reached.gather(1, self._num_kept - 1)


class _Searched:
    """Ids of ordered columns that were found by a search: they are there."""

    def __init__(self, ids: Tensor, num_columns: int) -> None:
        self._ids = ids
        self._num_columns = num_columns

    def find_ids(self, column: Tensor) -> Tensor:
        """Ids of columns [B, 1]."""
        return self._ids.gather(1, column)

    def restore(self, logits: Tensor) -> Tensor:
        """Ordered logits [B, C] in the order of ids [B, V]; -inf where there is none."""
        everything = logits.new_full((len(logits), self._num_columns), -math.inf)
        # The largest wins: padding may repeat the last id with -inf.
        return everything.scatter_reduce_(1, self._ids, logits, "amax")


class _Sorted:
    """Ids of ordered columns whose logits were sorted without them, the quicker way: looked up by value."""

    def __init__(self, logits: Tensor, negated: Tensor) -> None:
        self._logits = logits
        self._negated = negated

    def find_ids(self, column: Tensor) -> Tensor:
        """Ids of columns [B, 1]: among the ids of equal logits, as many are passed as columns are."""
        value = self._negated.gather(1, column)
        num_before = column - torch.searchsorted(self._negated, value)
        ties = (self._logits == -value).view(torch.uint8)
        return _count_within(ties.cumsum(1), num_before)

    def restore(self, logits: Tensor) -> Tensor:
        """Ordered logits [B, V] in the order of ids."""
        ids = self._logits.sort(dim=1, descending=True, stable=True).indices
        return torch.empty_like(logits).scatter_(1, ids, logits)


def reduce_blocks(values: Tensor, size: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce every ``size`` neighbours of a row, [B, N] -> [B, ceil(N / size)]; the last may be fewer."""
    num_whole = values.shape[1] // size
    blocks = reduce(values[:, : num_whole * size].reshape(len(values), num_whole, size), -1)
    if values.shape[1] % size:
        rest = reduce(values[:, num_whole * size :], -1).unsqueeze(1)
        blocks = torch.cat((blocks, rest), dim=1)
    return blocks


def take_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and the lowest id that has it, in two steps: far quicker than argmax.

    Args:
        logits: [B, V] float32.

    Returns:
        ids [B, 1] int64 and values [B, 1] float32, which are NaN where the row holds a NaN.
    """
    largest = reduce_blocks(logits, _BLOCK, torch.amax)
    block = largest.argmax(dim=1, keepdim=True)
    columns, inside = _expand_blocks(logits, block, _BLOCK, -math.inf)
    return columns.gather(1, inside.argmax(dim=1, keepdim=True)), largest.gather(1, block)


def take_best(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, largest first, ties lower id first: those of -inf too.

    Args:
        logits: [B, V] float32.
        num: 1 to min(V, ``MAX_SEARCHED``).

    Returns:
        ids [B, num] int64 and values [B, num] float32. NaN, if any, comes first.
    """
    # Ties are told apart by lowering each value by a share of its size, which -inf has not.
    ids, _ = _search(logits.clamp(min=torch.finfo(torch.float32).min), num)
    return ids, logits.gather(1, ids)


@functools.lru_cache(maxsize=16)
def _arange(num: int, device: torch.device) -> Tensor:
    """0 to num - 1, [num] int64."""
    with torch.inference_mode(False):
        return torch.arange(num, device=device)


@functools.lru_cache(maxsize=16)
def _tie_weights(num: int, device: torch.device) -> Tensor:
    """What each column is lowered by, relative to its size; see ``_order_keys``. [num] float64."""
    with torch.inference_mode(False):
        return torch.arange(1, num + 1, dtype=torch.float64, device=device) * -(2.0**-45)


def _expand_blocks(values: Tensor, blocks: Tensor, size: int, fill: float) -> tuple[Tensor, Tensor]:
    """Columns and values of blocks [B, n] of the values [B, N]; past N, column N - 1 and value ``fill``."""
    columns = (blocks.unsqueeze(-1) * size + _arange(size, values.device)).flatten(1)
    num_columns = values.shape[1]
    if num_columns % size == 0:
        return columns, values.gather(1, columns)
    past = columns >= num_columns
    columns = columns.clamp_(max=num_columns - 1)
    return columns, values.gather(1, columns).masked_fill_(past, fill)


def _order_keys(values: Tensor, weights: Tensor) -> Tensor:
    """Float64 keys that order float32 values and break ties by the lower column. -inf ties stay ties.

    Two different float32 values are at least 2^-24 apart, relatively. Lowering each by (column + 1) x 2^-45
    of its size therefore swaps no two values for columns below 2^21, and leaves 128 float64 steps between
    columns. Zero has no size to take a share of; adding 1e-200 gives it one and is lost in every other value.
    """
    keys = values.double().add_(1e-200)
    return keys.addcmul_(keys.abs(), weights)


def _search(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Ids of the ``num`` best of each row and their logits, [B, num] each. NaN, if any, comes first.

    The k best lie in the k blocks whose best come first, so only those blocks are searched.
    """
    num_columns = logits.shape[1]
    weights = _tie_weights(num_columns, logits.device)
    if 2 * num * _TOP_K_BLOCK > num_columns:
        ids = _order_keys(logits, weights).topk(num).indices
        return ids, logits.gather(1, ids)
    largest = reduce_blocks(logits, _TOP_K_BLOCK, torch.amax)
    blocks = _order_keys(largest, weights[: largest.shape[1]]).topk(num).indices
    columns, inside = _expand_blocks(logits, blocks, _TOP_K_BLOCK, -math.inf)
    best = _order_keys(inside, weights.take(columns)).topk(num).indices
    return columns.gather(1, best), inside.gather(1, best)


def _sort(logits: Tensor) -> tuple[_Sorted, Tensor]:
    """All logits of each row in descending order, [B, V]."""
    if logits.device.type == "cpu":
        # numpy sorts 49152 float32 in 0.2 ms with AVX-512, torch in 8 ms.
        negated = logits.detach().neg()
        negated.numpy().sort(axis=1)
    else:
        negated = logits.neg().sort(dim=1).values
    return _Sorted(logits, negated), negated.neg()


def _count_within(reached: Tensor, target: Tensor) -> Tensor:
    """Number of running sums [B, N] that are at most the target, [B, 1]: the column of the first above it."""
    # The clamp acts on rows of NaN and on rows where nothing is left; they must not index out of bounds.
    return torch.searchsorted(reached, target, right=True).clamp_(max=reached.shape[1] - 1)
