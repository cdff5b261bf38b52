"""What two results may differ by, and what no tolerance covers."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch

from astrai_bench.cross_cases import CrossCase
from astrai_bench.cross_compare import (
    HALF_ULP,
    differs_by_poison,
    exceeds,
    find_tolerance,
    have_same_bits,
    list_violations,
    measure_difference,
)
from astrai_bench.cross_inputs import CrossInputs, make_cross_inputs
from astrai_bench.cross_providers import Outputs, compute_reference

CPU = torch.device("cpu")
CASE = CrossCase(op="attn_paged_decode", dtype="bfloat16", q_lens=(1, 1, 1), kv_lens=(5, 0, 9))


def make_outputs(out: torch.Tensor, lse: torch.Tensor | None = None) -> Outputs:
    return Outputs(vectors={"out": out}, lse=lse)


def test_difference_is_measured_absolutely_per_vector_and_in_ulp() -> None:
    want = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    difference = measure_difference(
        make_outputs(want + torch.tensor([0.0, 0.5])), make_outputs(want), "bfloat16"
    )
    assert difference.absolute == 0.5
    assert difference.relative == pytest.approx(0.1)
    # Between 4 and 8 bfloat16 has steps of 2^-5.
    assert difference.ulp == 16.0
    assert difference.lse is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_half_ulp_is_that_of_torch(dtype: str) -> None:
    assert HALF_ULP[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


def test_zero_against_zero_is_no_difference_and_anything_else_is_infinite() -> None:
    zeros = make_outputs(torch.zeros(1, 1, 4))
    assert measure_difference(zeros, zeros, "float32").relative == 0
    assert (
        measure_difference(make_outputs(torch.full((1, 1, 4), 1e-30)), zeros, "float32").relative == math.inf
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_value_that_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    want = torch.ones(2, 1, 4)
    got = want.clone()
    got[1, 0, 2] = bad
    assert measure_difference(make_outputs(got), make_outputs(want), "float32").relative == math.inf


def test_wrong_shape_is_infinitely_wrong() -> None:
    got, want = make_outputs(torch.ones(2, 1, 4)), make_outputs(torch.ones(3, 1, 4))
    assert measure_difference(got, want, "float32").relative == math.inf


@pytest.mark.parametrize(
    ("got", "expected"), [(-math.inf, 0.0), (0.0, math.inf), (math.nan, math.inf), (math.inf, math.inf)]
)
def test_lse_of_an_empty_row_must_be_minus_infinity(got: float, expected: float) -> None:
    out = torch.zeros(1, 1, 4)
    a, b = (make_outputs(out, torch.tensor([[lse]])) for lse in (got, -math.inf))
    assert measure_difference(a, b, "float32").lse == expected


def test_wrong_lse_alone_exceeds() -> None:
    out = torch.ones(1, 1, 4)
    a, b = (make_outputs(out, torch.tensor([[lse]])) for lse in (2.0, 2.001))
    assert exceeds(measure_difference(a, b, "bfloat16"), find_tolerance(CASE, 2))


def test_tolerance_grows_with_roundings_and_with_the_dtype() -> None:
    bf16, f32 = CASE, attrs.evolve(CASE, dtype="float32")
    assert find_tolerance(bf16, 2) - find_tolerance(bf16, 1) == pytest.approx(2.0**-8)
    assert find_tolerance(f32, 7) < 2e-5


def test_bits_tell_nan_and_signed_zero_apart_from_values() -> None:
    nan = torch.tensor([math.nan])
    assert have_same_bits(nan, nan.clone())
    assert not have_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not have_same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.float16))


def test_results_that_depend_on_poison_are_named() -> None:
    out, lse = torch.ones(1, 1, 4), torch.ones(1, 1)
    assert differs_by_poison(make_outputs(out, lse), make_outputs(out.clone(), lse.clone())) == []
    assert differs_by_poison(make_outputs(out + 1e-7, lse), make_outputs(out, lse)) == ["out"]
    assert differs_by_poison(make_outputs(out, lse * 2), make_outputs(out, lse)) == ["lse"]


class Stage:
    """A call that was done right; tests spoil one thing."""

    def __init__(self) -> None:
        self.fresh, self.used = (make_cross_inputs(CASE, CPU, math.nan) for _ in range(2))
        self.reference = compute_reference(CASE, self.fresh)
        for name, pool in (("k", "k_buffer"), ("v", "v_buffer")):
            slots = self.slots
            rows = (slots >= 0).nonzero().flatten()
            self.used.arguments[pool][slots[rows]] = self.used.arguments[f"new_{name}"][rows]
        self.outputs = attrs.evolve(self.reference)

    @property
    def slots(self) -> torch.Tensor:
        slots = self.fresh.slots
        assert slots is not None
        return slots

    def list(self, outputs: Outputs | None = None) -> list[str]:
        return list_violations(CASE, self.fresh, self.used, outputs or self.outputs, self.reference)


def test_right_call_violates_nothing() -> None:
    assert Stage().list() == []


def test_empty_row_that_is_not_zero_is_a_violation() -> None:
    stage = Stage()
    out, lse = stage.outputs.vectors["out"].clone(), stage.outputs.lse
    assert lse is not None
    out[1] = 1e-20
    assert "wanted 0" in stage.list(make_outputs(out, lse))[0]
    wrong_lse = lse.clone()
    wrong_lse[1] = -1e30
    texts = stage.list(attrs.evolve(stage.outputs, lse=wrong_lse))
    assert any("-inf" in text for text in texts)


def test_stored_row_that_is_not_a_copy_is_a_violation() -> None:
    stage = Stage()
    stored = {**stage.outputs.stored, "v": stage.outputs.stored["v"] * 2}
    assert stage.list(attrs.evolve(stage.outputs, stored=stored)) == [
        "stored v: wanted the bits of the call in the pool"
    ]


@pytest.mark.parametrize("name", ["q", "k_buffer", "v_buffer", "new_k"])
def test_write_outside_the_results_is_a_violation(name: str) -> None:
    stage = Stage()
    base: Any = stage.used.bases[name]
    # The last slots of a pool belong to nobody.
    base[-1] = 7.0
    assert stage.list() == [f"{name}: memory outside what the call may write has changed"]


def test_padding_between_heads_is_watched() -> None:
    case = CrossCase(op="rotary_emb", layout="padded", rotary_dim=32)
    fresh, used = (make_cross_inputs(case, CPU, math.nan) for _ in range(2))
    reference = compute_reference(case, used)
    inside: CrossInputs = used
    inside.arguments["out"].copy_(reference.vectors["out"])
    assert list_violations(case, fresh, used, reference, reference) == []
    used.bases["out"][..., -1] = 0.0
    assert list_violations(case, fresh, used, reference, reference) != []
