"""Log-probabilities of a prompt's own tokens, computed while the prompt passes through the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from astrai_triton.engine.logprobs import read_score, score_tokens
from astrai_triton.engine.result import TokenLogprob
from astrai_triton.errors import NonFiniteLogitsError

MAX_SCORED_ROWS = 128
"""Prompt rows of one step that may be scored: each is a row of logits, 1 MiB in a vocabulary of 262144."""

# Logits scored at a time: what is in between takes some 20 bytes for each.
_MAX_LOGITS = 1 << 22


class PromptScores:
    """The log-probabilities of a prompt's tokens, as far as they are known. The first is None: nothing
    predicts it.

    Args:
        prompt_len: tokens of the prompt, at least one.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self.entries: list[TokenLogprob | None] = [None]

    @property
    def num_known(self) -> int:
        """Leading tokens of the prompt that are scored."""
        return len(self.entries)

    @property
    def is_complete(self) -> bool:
        """Whether all are."""
        return len(self.entries) == self._prompt_len

    def select_rows(self, start: int, end: int) -> range:
        """Positions of a chunk whose logits give new scores.

        Args:
            start: first position of the chunk; below ``num_known``, or a token would be left out.
            end: one behind its last.
        """
        return range(max(start, len(self.entries) - 1), min(end, self._prompt_len - 1))

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Append the scores of the next tokens."""
        self.entries.extend(entries)


def score_rows(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probability of one token a row. Reads the device once.

    Beside ``logits`` memory for a bounded number of rows is taken, and for the result.

    Args:
        logits: ``[R, V]`` float32, not changed.
        token_ids: ``[R]`` ids in ``[0, V)``.
        num_top: most likely tokens to report with each.

    Raises:
        NonFiniteLogitsError: a row has NaN or +inf, or nothing above -inf.
    """
    size = max(1, _MAX_LOGITS // logits.shape[1])
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    starts = range(0, len(token_ids), size)
    blocks = [score_tokens(logits[at : at + size], ids[at : at + size], num_top) for at in starts]
    entries = []
    for token_id, row in zip(token_ids, torch.cat(blocks).tolist(), strict=True):
        logprob, top = read_score(row, num_top)
        if math.isnan(logprob):
            raise NonFiniteLogitsError("the model's logits are not finite")
        entries.append(TokenLogprob(token_id, logprob, top))
    return entries
