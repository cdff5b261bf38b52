"""The explanation of a call that the library does not list."""

from __future__ import annotations

from astrai_bench.cases import Case
from astrai_bench.explain import describe_explanation, explain_case


def test_a_call_that_is_not_listed_is_compiled_as_it_is() -> None:
    case = Case(
        op="prefill", q_heads=5, kv_heads=1, head_dim=40, q_lens=(8,), kv_lens=(8,), dtype="float16", page=0
    )
    explanation = explain_case(case, 90)
    (launch,) = explanation.launches
    name = "prefill_dense_right_short_g5_d40_fp16"
    assert (launch.report.variant, launch.is_listed, launch.grid) == (name, False, (1, 1))
    assert launch.report.registers > 0
    assert launch.report.faults == ()
    lines = describe_explanation(explanation)
    assert any(line.endswith(f"{name}, which is not in the list") for line in lines)
