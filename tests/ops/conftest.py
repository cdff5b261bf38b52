"""Where there is a GPU the kernels are compiled for it, and these tests carry their CPU tensors there."""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    from astrai_triton import ops
    from carried import carry_all

    carry_all(ops, (name for name in ops.__all__ if callable(getattr(ops, name))), torch.device("cuda"))
