"""What a call of attention may say besides its tensors."""

from __future__ import annotations

import math

import attrs
import torch

LOG2_E = 1 / math.log(2)
"""Scores are in base 2: what turns a natural logarithm into one."""

INT32_MAX = 2**31 - 1


@attrs.frozen(eq=False, kw_only=True)
class Options:
    """The options of every attention op, checked; ``is_causal`` and ``mask_indptr`` are of prefill alone."""

    mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None = None
    """``[batch + 1]`` int64, where the mask of each packed request starts."""
    is_causal: bool = False
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    sinks: torch.Tensor | None
    k_scale: float | None
    v_scale: float | None
    return_lse: bool

    @property
    def sinks_dtype(self) -> torch.dtype | None:
        """Element type of the sinks, None without them."""
        return None if self.sinks is None else self.sinks.dtype

    @property
    def key_scale(self) -> float:
        """What K is to be multiplied by."""
        return 1.0 if self.k_scale is None else float(self.k_scale)

    @property
    def value_scale(self) -> float:
        """What V is to be multiplied by."""
        return 1.0 if self.v_scale is None else float(self.v_scale)

    @property
    def cap(self) -> float:
        """Bound of the scores in base 2, 0 without one."""
        return self.softcap * LOG2_E

    def find_scale(self, head_dim: int) -> float:
        """What the scores are to be multiplied by."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def scale_products(self, softmax_scale: float) -> float:
        """What products of q and K are multiplied by: to base 2, or to what the cap takes the tanh of."""
        return softmax_scale * self.key_scale * (1 / self.softcap if self.softcap else LOG2_E)
