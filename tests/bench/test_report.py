from __future__ import annotations

import io
import json
from typing import Any

import attrs
import pytest
from rich.console import Console

from astrai_bench.cases import Case, Ceilings
from astrai_bench.machine import Machine
from astrai_bench.measure import Report, Row
from astrai_bench.report import build_document, build_lines, build_table
from astrai_bench.timing import Timing
from astrai_bench.wording import format_count, format_seconds

CASE = Case(
    op="decode",
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    q_lens=(1,) * 16,
    kv_lens=(4096,) * 16,
    dtype="bfloat16",
    page=0,
)
NUM_BYTES = 16 * (2 * 4096 * 8 * 128 * 2 + 4 * 32 * 128)
TIMED = Row(
    provider="torch_sdpa",
    label="torch_sdpa",
    status="timed",
    error=1.5e-3,
    timing=Timing(median=0.2, p10=0.1, p90=0.3, repeats=20, inner=2, method="clock"),
)
WRONG = Row(provider="triton", label="triton", status="wrong", reason="is off", error=None)


def make_report(*rows: Row, **machine: Any) -> Report:
    plain = Machine(
        name="a CPU", kind="cpu", system="Linux", threads=2, cache_bytes=1 << 25, versions={"torch": "9"}
    )
    return Report(
        case=CASE,
        machine=attrs.evolve(plain, **machine),
        ceilings=Ceilings(bandwidth=NUM_BYTES / 0.05, flops=1e15, source="made up"),
        tolerance=1e-2,
        num_sets=3,
        is_cold=True,
        rows=rows,
    )


def render(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(build_table(report))
    return stream.getvalue()


def test_the_document_survives_json_and_says_what_was_measured_where_and_when() -> None:
    document = json.loads(json.dumps(build_document(make_report(TIMED, WRONG)), allow_nan=False))
    assert document["bench"] == "decode"
    assert document["case"]["kv_lens"] == [4096] * 16
    assert document["machine"] == {
        "name": "a CPU",
        "kind": "cpu",
        "system": "Linux",
        "threads": 2,
        "cache_bytes": 1 << 25,
    }
    assert document["versions"] == {"torch": "9"}
    assert document["date"].endswith("+00:00")
    assert document["buffers"] == {"sets": 3, "leave_cache": True}
    assert document["check"]["tolerance"] == 1e-2


def test_rates_and_the_share_of_the_roofline_come_from_the_median() -> None:
    row = build_document(make_report(TIMED))["rows"][0]
    assert (row["median_us"], row["p10_us"], row["p90_us"]) == pytest.approx((2e5, 1e5, 3e5))
    assert row["gb_s"] == pytest.approx(NUM_BYTES / 0.2 / 1e9)
    assert row["tflop_s"] == pytest.approx(4 * 32 * 128 * 4096 * 16 / 0.2 / 1e12)
    # The ceilings make the roofline 50 ms.
    assert row["roofline_percent"] == pytest.approx(25)


def test_a_provider_that_was_not_timed_has_no_rates() -> None:
    row = build_document(make_report(WRONG))["rows"][0]
    assert row == {
        "provider": "triton",
        "label": "triton",
        "status": "wrong",
        "reason": "is off",
        "error": None,
    }


def test_a_cpu_is_told_what_an_h200_would_need() -> None:
    report = make_report(TIMED)
    prediction = build_document(report)["prediction"]
    assert prediction["us"] == pytest.approx(62, rel=0.015)
    assert prediction["bound"] == "memory"
    assert any("an H200 needs at least 62.5 µs" in line for line in build_lines(report))


def test_a_gpu_is_told_no_prediction() -> None:
    report = make_report(TIMED, kind="cuda")
    assert build_document(report)["prediction"] is None
    assert not any("H200" in line for line in build_lines(report))


def test_the_table_has_a_line_for_every_provider() -> None:
    text = render(make_report(TIMED, WRONG))
    timed, wrong = (line for line in text.splitlines() if "torch_sdpa" in line or "triton" in line)
    for cell in ("200 ms", "100 ms – 300 ms", "25.0", "1.5e-03", "20 x 2 calls, clock"):
        assert cell in timed
    assert "wrong" in wrong
    assert "is off" in wrong


def test_inputs_that_stay_in_the_cache_are_pointed_out() -> None:
    warm = attrs.evolve(make_report(), is_cold=False)
    assert any("3 sets in turn, which STAY IN the cache of 32 MiB" in line for line in build_lines(warm))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (0.9994, "999 ms"), (1e-3, "1 ms"), (62.5e-6, "62.5 µs"), (5e-7, "500 ns")],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 "), (67_371_008, "67.4 M"), (999_600, "1 M"), (5_498_000_000_000, "5.5 T")]
)
def test_counts_have_three_digits_and_a_prefix(count: int, text: str) -> None:
    assert format_count(count) == text
