"""The kernels on the CPU: built once, then found in the cache of extensions."""

from __future__ import annotations

from types import ModuleType

import pytest

import cuda_ref


@pytest.fixture(scope="session")
def host() -> ModuleType:
    """The host build."""
    reason = cuda_ref.why_not("host")
    if reason is not None:
        pytest.skip(reason)
    return cuda_ref.build("host")
