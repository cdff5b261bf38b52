from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from astrai_bench import compare, report
from astrai_bench.compare import build_pair_document, build_pair_table, compare_documents, load_document
from astrai_bench.errors import BenchError


def make_row(label: str, median: float, spread: float = 1.0) -> dict[str, Any]:
    return {
        "label": label,
        "status": "timed",
        "median_us": median,
        "p10_us": median - spread,
        "p90_us": median + spread,
    }


def make_document(*rows: dict[str, Any], **case: Any) -> dict[str, Any]:
    return {"format": 1, "bench": "decode", "case": {"batch": 1} | case, "rows": list(rows)}


def test_ratios_are_b_over_a() -> None:
    a = make_document(make_row("triton", 100.0), make_row("torch_sdpa", 50.0))
    b = make_document(make_row("triton", 80.0), make_row("torch_sdpa", 51.0))
    faster, same = compare_documents(a, b)
    assert (faster.provider, faster.ratio, faster.is_apart) == ("triton", pytest.approx(0.8), True)
    assert (same.ratio, same.is_apart) == (pytest.approx(1.02), False)


def test_a_provider_of_one_run_has_no_ratio() -> None:
    unavailable = {"label": "triton", "status": "unavailable", "reason": "no GPU"}
    a, b = make_document(unavailable, make_row("torch_sdpa", 5.0)), make_document(make_row("triton", 1.0))
    pairs = {pair.provider: pair for pair in compare_documents(a, b)}
    assert (pairs["torch_sdpa"].a_us, pairs["torch_sdpa"].b_us, pairs["torch_sdpa"].ratio) == (
        5.0,
        None,
        None,
    )
    assert (pairs["triton"].a_us, pairs["triton"].b_us, pairs["triton"].ratio) == (None, 1.0, None)


def test_runs_of_different_cases_are_refused_with_the_difference() -> None:
    a, b = make_document(batch=1, page=4), make_document(batch=2, page=4)
    with pytest.raises(BenchError, match="wanted two runs of one case, got batch 1 and 2"):
        compare_documents(a, b)


def test_the_table_says_who_is_faster_only_beyond_the_spread() -> None:
    a = make_document(make_row("triton", 100.0), make_row("torch_sdpa", 50.0), make_row("flashinfer", 9.0))
    b = make_document(make_row("triton", 80.0), make_row("torch_sdpa", 51.0))
    stream = io.StringIO()
    Console(file=stream, width=120).print(build_pair_table(compare_documents(a, b)))
    lines = {line.split()[1]: line for line in stream.getvalue().splitlines() if len(line.split()) > 2}
    assert "0.800" in lines["triton"]
    assert "B is faster" in lines["triton"]
    assert "within the spread" in lines["torch_sdpa"]
    assert "timed in one run only" in lines["flashinfer"]


def test_a_comparison_is_a_json_object_too() -> None:
    pairs = compare_documents(make_document(make_row("triton", 2.0)), make_document(make_row("triton", 1.0)))
    document = json.loads(json.dumps(build_pair_document((Path("a"), Path("b")), pairs)))
    assert document["compare"] == ["a", "b"]
    assert document["rows"][0]["ratio"] == 0.5


def test_everything_a_bench_printed_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("a table\nµs\n" + json.dumps(make_document()) + "\n\n", encoding="utf-8")
    assert load_document(path) == make_document()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "wanted the JSON object of a kernel bench on the last line, got ''"),
        ("{}\nno json", "got 'no json'"),
        ("[1]", "JSON, but not of a kernel bench"),
        ("{}", "JSON, but not of a kernel bench"),
        ('{"format": 99, "case": {}, "rows": []}', "wanted format 1, got 99; run the bench again"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchError) as caught:
        load_document(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.json"):
        load_document(tmp_path / "none.json")


def test_what_is_written_is_what_is_read() -> None:
    assert compare.FORMAT == report.FORMAT
