"""The steps of the sampler: each edits, rescales or narrows the candidates of a whole batch at once."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from astrai_triton.engine.candidates import Candidates
from astrai_triton.engine.host import forbid, is_on_host
from astrai_triton.engine.params import GREEDY_BELOW


class BaseSamplingStrategy(ABC):
    """One step of the sampler.

    A parameter is one number for all rows or a sequence with one number per row.
    """

    @abstractmethod
    def narrow(self, candidates: Candidates) -> None:
        """Edit, rescale or drop candidates."""

    def apply(self, logits: Tensor) -> Tensor:
        """Run this step alone.

        Args:
            logits: [B, V] floating point, not changed.

        Returns:
            [B, V] float32; what the step drops is -inf.
        """
        candidates = Candidates(logits.float())
        self.narrow(candidates)
        return candidates.to_logits()


class TemperatureStrategy(BaseSamplingStrategy):
    """Divide the logits by the temperature.

    The division is owed until the end of the pipeline: the steps between look at the order, which it cannot
    change, or at probabilities, which include it.

    Args:
        temperature: 1e-5 or more; greedy is ``TopKStrategy(1)``.

    Raises:
        ValueError: a temperature below that.
    """

    def __init__(self, temperature: float | Sequence[float]) -> None:
        _check_range("temperature", temperature, GREEDY_BELOW, math.inf)
        if isinstance(temperature, (int, float)):
            self._scale: float | Sequence[float] = 1.0 / temperature
        else:
            self._scale = [1.0 / value for value in temperature]

    def narrow(self, candidates: Candidates) -> None:
        """Owe the candidates one more factor."""
        scale = _per_row(self._scale, torch.float32, candidates.logits.device)
        candidates.rescale(scale)


class TopKStrategy(BaseSamplingStrategy):
    """Keep the k largest logits, exactly k; ties go to the lower id.

    Args:
        top_k: 0, -1 or anything from the vocabulary size on keeps all.

    Raises:
        ValueError: a top_k below -1.
    """

    def __init__(self, top_k: int | Sequence[int]) -> None:
        _check_range("top_k", top_k, -1, math.inf)
        self._top_k = top_k

    def narrow(self, candidates: Candidates) -> None:
        """Order the candidates and cut after the k-th."""
        num_candidates = candidates.logits.shape[1]
        limits = [self._top_k] if isinstance(self._top_k, int) else self._top_k
        limits = [k if 0 < k < num_candidates else num_candidates for k in limits]
        if min(limits) == num_candidates:
            return
        candidates.order(max(limits))
        if min(limits) < max(limits):
            candidates.keep_first(torch.tensor(limits, device=candidates.logits.device).unsqueeze(1))
        elif max(limits) < candidates.logits.shape[1]:
            candidates.keep_first(max(limits))


class TopPStrategy(BaseSamplingStrategy):
    """Keep the smallest set of most likely tokens whose probability reaches p; ties go to the lower id.

    Args:
        top_p: 0 to 1; 0 keeps one token.

    Raises:
        ValueError: outside the range.
    """

    def __init__(self, top_p: float | Sequence[float]) -> None:
        _check_range("top_p", top_p, 0.0, 1.0)
        self._top_p = top_p

    def narrow(self, candidates: Candidates) -> None:
        """Order the candidates and cut where the mass before has reached the share p of the whole."""
        candidates.order()
        candidates.keep_share(_per_row(self._top_p, torch.float64, candidates.logits.device))


class MinPStrategy(BaseSamplingStrategy):
    """Drop tokens less likely than a share of the most likely one.

    Args:
        min_p: 0 to 1.

    Raises:
        ValueError: outside the range.
    """

    def __init__(self, min_p: float | Sequence[float]) -> None:
        _check_range("min_p", min_p, 0.0, 1.0)
        self._min_p = min_p

    def narrow(self, candidates: Candidates) -> None:
        """Compare masses: the largest is ``MASS_ONE`` in every row."""
        candidates.keep_likely(_per_row(self._min_p, torch.float64, candidates.logits.device))


class EditStrategy(BaseSamplingStrategy):
    """A step that writes into logits, in the order of ids."""

    @abstractmethod
    def edit_(self, logits: Tensor) -> Callable[[], None]:
        """Edit logits [B, V] float32 in place; give what puts back what stood there."""

    def narrow(self, candidates: Candidates) -> None:
        """Edit a copy of the logits.

        Raises:
            ValueError: the candidates were ordered by an earlier step.
        """
        self.edit_(candidates.editable())


class _SparseEdit(EditStrategy):
    """Changes the logits of a few tokens in each row."""

    def __init__(self, tokens: Sequence[Mapping[int, float]]) -> None:
        lengths = [len(row) for row in tokens]
        num = sum(lengths)
        self._num_rows = len(tokens)
        self._row_idx: npt.NDArray[np.int64] = np.repeat(np.arange(len(tokens)), lengths)
        self._ids: npt.NDArray[np.int64] = np.fromiter(chain.from_iterable(tokens), np.int64, num)
        self._values: npt.NDArray[np.float64] = np.fromiter(
            chain.from_iterable(row.values() for row in tokens), np.float64, num
        )

    @abstractmethod
    def _edited(self, logits: Tensor) -> Tensor:
        """New values for the logits [n] of the tokens, in the order they were given."""

    def _spread(self, values: float | Sequence[float]) -> npt.NDArray[np.float64]:
        """The parameter of each token's row, [n]."""
        rows = np.broadcast_to(np.asarray(values, dtype=np.float64), (self._num_rows,))
        return rows[self._row_idx]

    def edit_(self, logits: Tensor) -> Callable[[], None]:
        """Edit logits [B, V] float32 in place; give what puts back what stood there."""
        device = logits.device
        where = (torch.from_numpy(self._row_idx).to(device), torch.from_numpy(self._ids).to(device))
        old = logits[where]
        logits[where] = self._edited(old)
        return lambda: logits.__setitem__(where, old)


class PenaltyStrategy(_SparseEdit):
    """Make generated tokens less likely.

    Repetition comes first: it divides positive logits and multiplies the others (CTRL, arXiv 1909.05858).
    Then ``presence + frequency * count`` is subtracted (as OpenAI's API defines them).

    Args:
        counts: for each row, generated token id -> occurrences, > 0.
        presence: any number; negative favours repetition.
        frequency: the same.
        repetition: > 0; 1 is off.
    """

    def __init__(
        self,
        counts: Sequence[Mapping[int, int]],
        presence: float | Sequence[float] = 0.0,
        frequency: float | Sequence[float] = 0.0,
        repetition: float | Sequence[float] = 1.0,
    ) -> None:
        super().__init__(counts)
        self._offset = self._spread(presence) + self._spread(frequency) * self._values
        self._repetition = self._spread(repetition)

    def _edited(self, logits: Tensor) -> Tensor:
        parameters = torch.from_numpy(np.stack((self._repetition, self._offset))).to(logits)
        repetition, offset = parameters.unbind()
        return torch.where(logits > 0, logits / repetition, logits * repetition) - offset


class LogitBiasStrategy(_SparseEdit):
    """Add to the logits of some tokens.

    Args:
        biases: for each row, token id -> what is added; -inf forbids the token.
    """

    def __init__(self, biases: Sequence[Mapping[int, float]]) -> None:
        super().__init__(biases)

    def _edited(self, logits: Tensor) -> Tensor:
        return logits + torch.from_numpy(self._values).to(logits)


class GrammarStrategy(EditStrategy):
    """Forbid the tokens that a grammar does not allow next.

    Args:
        masks: [R, ceil(V / 32)] int32, little-endian; bit i % 32 of word i // 32: token i may come.
        row_idx: the row of the batch that each mask is for.
    """

    def __init__(self, masks: npt.NDArray[np.int32], row_idx: Sequence[int]) -> None:
        self._octets = masks.view(np.uint8)
        self._row_idx = row_idx

    def edit_(self, logits: Tensor) -> Callable[[], None]:
        """Edit logits [B, V] float32 in place; give what puts back what stood there."""
        if is_on_host(logits.device):
            rows = logits.detach().numpy()
            undo = [forbid(rows[i], octets) for i, octets in zip(self._row_idx, self._octets, strict=True)]
            return lambda: _call_all(undo)
        device = logits.device
        where = torch.tensor(self._row_idx, device=device)
        old = logits[where]
        octets = torch.from_numpy(self._octets).to(device, torch.int32)
        # Eight logits a lookup. Adding, where a fill would do, lets NaN and +inf show.
        added = torch.nn.functional.embedding(octets, _octet_biases(device)).flatten(1)
        logits[where] = old + added[:, : logits.shape[1]]
        return lambda: logits.__setitem__(where, old)


@functools.lru_cache(maxsize=16)
def _octet_biases(device: torch.device) -> Tensor:
    """What is added to the logits of the eight bits of an octet, lowest first, [256, 8] float32."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8).reshape(-1, 1), axis=1, bitorder="little")
    with torch.inference_mode(False):
        return torch.from_numpy(np.where(bits, 0.0, -np.inf).astype(np.float32)).to(device)


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _per_row(values: float | Sequence[float], dtype: torch.dtype, device: torch.device) -> float | Tensor:
    """One value for all rows as a number, else a column [B, 1]."""
    if isinstance(values, (int, float)):
        return values
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _check_range(name: str, values: float | Sequence[float], low: float, high: float) -> None:
    for value in (values,) if isinstance(values, (int, float)) else values:
        if not low <= value <= high:
            raise ValueError(f"{name}: wanted {low} to {high}, got {value}")
