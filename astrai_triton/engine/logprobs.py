"""Log-probabilities: computed for a batch, and handed out together with the text they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from astrai_triton.engine.candidates import MASS_ONE, Candidates, take_best
from astrai_triton.engine.host import is_on_host, score_on_host
from astrai_triton.engine.result import TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for everything below it, so that what is reported is finite."""


@torch.inference_mode()
def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int = 0) -> Tensor:
    """Log-probabilities of one token a row, and of the row's most likely ones.

    A row of the result is a function of its logits, its token and ``num_top`` alone, bit for bit; a smaller
    ``num_top`` gives the leading alternatives of a larger one. Nothing is read from the device.

    Args:
        logits: ``[R, V]`` float32, not changed.
        token_ids: ``[R]`` int64 in ``[0, V)``.
        num_top: alternatives, 0 to 512; more than V are V.

    Returns:
        ``[R, 1 + 2 * K]`` float64, K = ``min(num_top, V)``: the token's log-probability, the ids of the K
        most likely tokens, ties lower id first, and their log-probabilities. Natural log, at least
        ``LEAST_LOGPROB``; NaN in a row with NaN or +inf, or nothing above -inf. ``read_score`` reads a row.
    """
    num_top = min(num_top, logits.shape[1])
    if is_on_host(logits.device):
        scores = score_on_host(logits, token_ids, num_top)
        scores[:, :1].clip(min=LEAST_LOGPROB, out=scores[:, :1])
        scores[:, 1 + num_top :].clip(min=LEAST_LOGPROB, out=scores[:, 1 + num_top :])
        return torch.from_numpy(scores)
    candidates = Candidates(logits)
    top = candidates.top().double()
    log_mass = (candidates.mass().sum(1, keepdim=True) / MASS_ONE).log_()
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    if not num_top:
        return _log_share(chosen, top, log_mass)
    ids, values = take_best(logits, num_top)
    shares = _log_share(torch.cat((chosen, values), dim=1), top, log_mass)
    # Ids are far below 2^53: exact as float64, so that one tensor carries all.
    return torch.cat((shares[:, :1], ids.double(), shares[:, 1:]), dim=1)


def read_score(row: Sequence[float], num_top: int = 0) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Read a row of ``score_tokens``.

    Args:
        row: ``[1 + 2 * K]``, of a row that is finite.
        num_top: alternatives wanted.

    Returns:
        The token's log-probability, and ``(token id, log-probability)`` of ``min(num_top, K)`` alternatives.
    """
    middle = (len(row) + 1) // 2
    pairs = zip(row[1 : 1 + min(num_top, middle - 1)], row[middle:], strict=False)
    return row[0], tuple((int(token_id), logprob) for token_id, logprob in pairs)


def _log_share(logits: Tensor, top: Tensor, log_mass: Tensor) -> Tensor:
    """Log of the probability of logits [R, n], whose row's largest is ``top``; [R, n] float64."""
    return (logits.double() - top - log_mass).clamp_(min=LEAST_LOGPROB)


class LogprobQueue:
    """Entries of sampled tokens, held back until the text of their tokens is out.

    A token's text are the characters that it completed. One that completed none goes with the next
    character: that may need its bytes.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """Entries and how many characters must be out for each, in order."""
        self._num_decoded = 0
        self._num_released = 0

    def push(self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...], num_chars: int) -> None:
        """Add the entry of a token that completed ``num_chars`` characters."""
        entry = TokenLogprob(token_id, logprob, top, self._num_decoded)
        self._held.append((self._num_decoded + max(num_chars, 1), entry))
        self._num_decoded += num_chars

    def release(self, num_chars: int) -> tuple[TokenLogprob, ...]:
        """Give the entries of the tokens whose text is out, now that ``num_chars`` more characters are."""
        self._num_released += num_chars
        entries: list[TokenLogprob] = []
        while self._held and self._held[0][0] <= self._num_released:
            entries.append(self._held.popleft()[1])
        return tuple(entries)

    def finish(self, num_chars: int, *, is_cut: bool) -> tuple[TokenLogprob, ...]:
        """Give what is left, now that the last ``num_chars`` characters are out.

        Args:
            num_chars: of this release.
            is_cut: the text ends here because of a stop string; tokens that begin at it or later are dropped.
        """
        self._num_released += num_chars
        held, self._held = self._held, deque()
        return tuple(entry for _, entry in held if not is_cut or entry.offset < self._num_released)
