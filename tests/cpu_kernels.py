"""Marks for tests that need the CPU kernels: skipped, with the reason, where they cannot be built or run."""

from __future__ import annotations

from typing import Any

import pytest

from astrai_triton.cpu import ISAS, Isa, why_not_build


def _mark(isa: Isa | None) -> pytest.MarkDecorator:
    reason = why_not_build(isa)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


needs_kernels = _mark(None)

ALL_ISAS: list[Any] = [pytest.param(isa, marks=_mark(isa)) for isa in ISAS]
"""Every instruction set as a parameter."""
