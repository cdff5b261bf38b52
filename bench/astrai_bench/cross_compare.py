"""How far two implementations are apart, how far they may be, and what must not differ by a bit."""

from __future__ import annotations

import math

import attrs
import torch

from astrai_bench.cross_cases import CrossCase
from astrai_bench.cross_inputs import CrossInputs
from astrai_bench.cross_providers import Outputs

HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to nearest: half the distance of neighbours, over the smaller."""

FLOAT32_SLACK = 1e-5
"""Of float32 arithmetic between the roundings, per head vector: a hundred sums and products of 2^-24 each,
and scores near 10, whose own 2^-24 an exponential multiplies by that. TF32, at 2^-11, fails."""

LSE_TOLERANCE = 2e-5
"""Over max(1, |lse|): it is float32 in every dtype, and scores of 16-bit inputs are summed in float32."""

_BITS = {2: torch.int16, 4: torch.int32}


@attrs.frozen(kw_only=True)
class Difference:
    """Two implementations of one call, the largest over all results. Infinite where only one is finite."""

    absolute: float
    relative: float
    """Of the vector of one head of one row: |a - b| / |b|."""
    ulp: float
    """In units of the output dtype's spacing at the largest element of the vector: near a zero crossing a
    single element is off by many of its own."""
    lse: float | None
    """Over max(1, |lse|); None where one of them has none."""


def measure_difference(a: Outputs, b: Outputs, dtype: str) -> Difference:
    """``b`` is the base of relative errors; the names of both must be the same."""
    absolute = relative = ulp = 0.0
    if a.vectors.keys() != b.vectors.keys():
        return Difference(absolute=math.inf, relative=math.inf, ulp=math.inf, lse=None)
    for name, want in b.vectors.items():
        figures = _compare_vectors(a.vectors[name], want, dtype)
        absolute, relative, ulp = (max(x, y) for x, y in zip((absolute, relative, ulp), figures, strict=True))
    lse = None if a.lse is None or b.lse is None else _compare_lse(a.lse, b.lse)
    return Difference(absolute=absolute, relative=relative, ulp=ulp, lse=lse)


def _compare_vectors(got: torch.Tensor, want: torch.Tensor, dtype: str) -> tuple[float, float, float]:
    if got.shape != want.shape or not bool(torch.isfinite(got).all() and torch.isfinite(want).all()):
        return math.inf, math.inf, math.inf
    if not got.numel():
        return 0.0, 0.0, 0.0
    got, want = got.double(), want.double()
    off = (got - want).abs()
    norms = torch.linalg.vector_norm(off, dim=-1), torch.linalg.vector_norm(want, dim=-1)
    # A row without keys is exactly 0 on both sides, or infinitely wrong.
    relative = torch.where(norms[0] == 0, 0.0, norms[0] / norms[1])
    largest = want.abs().amax(dim=-1).clamp(min=torch.finfo(getattr(torch, dtype)).tiny)
    spacing = torch.exp2(torch.floor(torch.log2(largest))) * 2 * HALF_ULP[dtype]
    return float(off.max()), float(relative.max()), float((off.amax(dim=-1) / spacing).max())


def _compare_lse(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape:
        return math.inf
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    off = (got - want).abs() / want.abs().clamp(min=1.0)
    off = torch.where(got == want, 0.0, off)
    return float(torch.nan_to_num(off, nan=math.inf, posinf=math.inf).max())


def find_tolerance(case: CrossCase, roundings: int) -> float:
    """Of ``Difference.relative`` for two implementations.

    Args:
        case: its dtype counts.
        roundings: to the dtype, of both implementations together, on the way to a result. A pair may err in
            opposite directions, so they add up.
    """
    return roundings * HALF_ULP[case.dtype] + FLOAT32_SLACK


def exceeds(difference: Difference, tolerance: float) -> bool:
    """Whether two implementations disagree."""
    return difference.relative > tolerance or (difference.lse is not None and difference.lse > LSE_TOLERANCE)


def list_violations(
    case: CrossCase, fresh: CrossInputs, used: CrossInputs, outputs: Outputs, reference: Outputs
) -> list[str]:
    """What one run did that no tolerance covers.

    Args:
        case: the call.
        fresh: its inputs as they were; changed here.
        used: the same inputs after the run.
        outputs: of the run.
        reference: the right ones.
    """
    violations = []
    if reference.lse is not None:
        empty = reference.lse == -math.inf
        if bool((outputs.vectors["out"][empty] != 0).any()):
            violations.append("empty rows: wanted 0 where no key is seen")
        if outputs.lse is not None and bool((outputs.lse[empty] != -math.inf).any()):
            violations.append("empty rows: wanted an lse of -inf where no key is seen")
    violations += [
        f"stored {name}: wanted the bits of the call in the pool"
        for name, want in reference.stored.items()
        if name not in outputs.stored or not have_same_bits(outputs.stored[name], want)
    ]
    for view, written in zip(fresh.written, used.written, strict=True):
        view.copy_(written)
    violations += [
        f"{name}: memory outside what the call may write has changed"
        for name, base in fresh.bases.items()
        if not have_same_bits(base, used.bases[name])
    ]
    return violations


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of NaN, and of zeros with a sign."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.element_size()]
    return bool(torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)))


def differs_by_poison(with_nan: Outputs, with_zero: Outputs) -> list[str]:
    """Names of results whose bits depend on memory that the call does not use."""
    pairs = [(name, with_nan.vectors[name], with_zero.vectors[name]) for name in with_nan.vectors]
    if with_nan.lse is not None and with_zero.lse is not None:
        pairs.append(("lse", with_nan.lse, with_zero.lse))
    return [name for name, a, b in pairs if not have_same_bits(a, b)]
