"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import os

import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Speed is for benches: a busy machine must fail no test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# For tests that are meant to fail: the first failing case will do, it need not be the smallest.
settings.register_profile(
    "first_failure", phases=[Phase.explicit, Phase.generate], derandomize=True, deadline=None
)
