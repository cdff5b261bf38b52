"""The ways logits on a CPU can be sampled.

By kernels if they are built, with numpy, and by the tensor operations that devices run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from astrai_triton.engine import host, logprobs, sample_plan, sampling, strategies


@contextmanager
def sample_as_devices_do() -> Iterator[None]:
    """Inside, logits on the CPU are sampled as those on a GPU are."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (host, logprobs, sample_plan, sampling, strategies):
            patch.setattr(module, "is_on_host", lambda _: False)
        yield


@contextmanager
def sample_without_kernels() -> Iterator[None]:
    """Inside, rows on the CPU are sampled with numpy alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "find_row_kernels", lambda: None)
        yield


Path = Callable[[], AbstractContextManager[None]]
all_paths = pytest.mark.parametrize(
    "path", [nullcontext, sample_without_kernels, sample_as_devices_do], ids=["host", "numpy", "device"]
)
