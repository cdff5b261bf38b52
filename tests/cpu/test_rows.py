from __future__ import annotations

import math

import numpy as np
import pytest

from astrai_triton.cpu import build
from astrai_triton.cpu.rows import MASS_BLOCK, NUMPY, RowKernels, RowOps
from cpu_kernels import ALL_ISAS

WIDTHS = [1, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 1000, 49152]


@pytest.fixture(params=["numpy", *ALL_ISAS])
def ops(request: pytest.FixtureRequest) -> RowOps:
    return NUMPY if request.param == "numpy" else RowKernels(build(request.param))


def make_row(width: int) -> np.ndarray:
    """Around zero, some -inf."""
    rng = np.random.default_rng(width)
    row = (rng.standard_normal(width) * 4).astype(np.float32)
    row[rng.random(width) < 0.1] = -np.inf
    row[rng.integers(width)] = 5.0
    return row


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.7, 1e5])
@pytest.mark.parametrize("width", WIDTHS)
def test_mass_is_the_rounded_exponential_and_whole(ops: RowOps, width: int, scale: float) -> None:
    row = make_row(width)
    top = float(row.max())
    mass = ops.weigh(row, top, scale)
    exact = np.exp((row.astype(np.float64) - top) * scale) * 2.0**32
    assert mass.dtype == np.float64
    assert np.array_equal(mass, np.rint(mass))
    assert mass.max() == 2.0**32
    np.testing.assert_allclose(mass, exact, rtol=4e-6, atol=0.6)
    assert not mass[np.isinf(row)].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_those_of_the_masses_exactly(ops: RowOps, width: int) -> None:
    row = make_row(width)
    top = float(row.max())
    mass = ops.weigh(row, top, 1.3)
    expected = [math.fsum(mass[at : at + MASS_BLOCK]) for at in range(0, width, MASS_BLOCK)]
    assert ops.sum_mass(row, top, 1.3).tolist() == expected


@pytest.mark.parametrize("bound", [-100.0, 0.0, 4.9, 5.0, 60.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_large_logits_are_found_in_order(ops: RowOps, width: int, bound: float) -> None:
    row = make_row(width)
    found = ops.find_large(row, bound)
    assert np.array_equal(found, np.flatnonzero(row >= np.float32(bound)))
    ops.find_large(row, -100.0)
    assert np.array_equal(found, np.flatnonzero(row >= np.float32(bound)))
