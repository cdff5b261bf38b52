"""Judging of implementations that are right, a little off, far off, broken or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result

from astrai_bench import cross_providers, cross_run
from astrai_bench.cli import bench
from astrai_bench.cross_cases import CrossCase, draw_cross_cases
from astrai_bench.cross_inputs import CrossInputs
from astrai_bench.cross_providers import CrossProvider, Outputs, compute_reference
from astrai_bench.cross_run import CaseResult, find_availability, run_case, run_cases

CPU = torch.device("cpu")
CASE = CrossCase(op="attn_decode", dtype="bfloat16", kv_lens=(9,))
Spoil = Callable[[torch.Tensor], torch.Tensor]


def right(case: CrossCase, inputs: CrossInputs) -> Outputs:
    """The right result, rounded to the dtype once."""
    reference = compute_reference(case, inputs)
    dtype = getattr(torch, case.dtype)
    return attrs.evolve(
        reference,
        vectors={name: vectors.to(dtype) for name, vectors in reference.vectors.items()},
        lse=None if reference.lse is None else reference.lse.float(),
    )


def spoiled(spoil: Spoil) -> Callable[[CrossCase, CrossInputs], Outputs]:
    def run(case: CrossCase, inputs: CrossInputs) -> Outputs:
        outputs = right(case, inputs)
        return attrs.evolve(outputs, vectors={"out": spoil(outputs.vectors["out"].clone())})

    return run


def one_ulp_off(out: torch.Tensor) -> torch.Tensor:
    out[0, 0, 3] = out[0, 0, 3].view(torch.int16).add(1).view(torch.bfloat16)
    return out


def far_off(out: torch.Tensor) -> torch.Tensor:
    out[0, 0] *= 1.1
    return out


def raises(case: CrossCase, inputs: CrossInputs) -> Outputs:
    raise RuntimeError("launch failed\nsecond line")


def provider(name: str, run: Any = right, **changes: Any) -> CrossProvider:
    fields: dict[str, Any] = {
        "name": name,
        "roundings": 1,
        "unavailable": lambda device: None,
        "why_not": lambda case: None,
        "run": run,
    }
    return CrossProvider(**(fields | changes))


def pairs_over(result: CaseResult) -> list[tuple[str, str]]:
    return [(pair.a, pair.b) for pair in result.pairs if pair.is_over]


def test_right_and_one_ulp_off_agree_with_each_other_and_with_float64() -> None:
    result = run_case(CASE, [provider("a"), provider("b", spoiled(one_ulp_off))], CPU)
    assert [(pair.a, pair.b) for pair in result.pairs] == [("a", "float64"), ("b", "float64"), ("b", "a")]
    assert not result.is_wrong
    difference = result.pairs[-1].difference
    assert 0 < difference.ulp <= 1
    assert difference.absolute > 0
    assert difference.lse == 0


def test_one_far_off_is_over_tolerance_in_each_of_its_pairs_and_in_no_other() -> None:
    result = run_case(CASE, [provider("a"), provider("b", spoiled(far_off)), provider("c")], CPU)
    assert pairs_over(result) == [("b", "float64"), ("b", "a"), ("c", "b")]
    assert result.is_wrong


def test_one_that_raises_is_a_finding_and_the_others_are_compared() -> None:
    result = run_case(CASE, [provider("a", raises), provider("b")], CPU)
    assert [(run.provider, run.status, run.reason) for run in result.runs] == [
        ("a", "failed", "RuntimeError: launch failed"),
        ("b", "ran", ""),
    ]
    assert [(pair.a, pair.b) for pair in result.pairs] == [("b", "float64")]
    assert result.is_wrong


def test_one_that_skips_gives_its_reason_and_is_not_wrong() -> None:
    result = run_case(
        CASE, [provider("a", raises, why_not=lambda case: f"not {case.dtype}"), provider("b")], CPU
    )
    assert result.runs[0].reason == "not bfloat16"
    assert not result.is_wrong


def test_one_that_reads_unused_memory_is_found() -> None:
    case = CrossCase(op="attn_decode", dtype="bfloat16", kv_lens=(9,), window=(3, -1))

    def sums_all_keys(case: CrossCase, inputs: CrossInputs) -> Outputs:
        outputs = right(case, inputs)
        # Below every tolerance, and never NaN: only the two runs together give it away.
        leak = torch.nan_to_num(inputs.arguments["k"].float().sum(), nan=3.0) / 30
        return attrs.evolve(outputs, lse=None if outputs.lse is None else outputs.lse + 5e-6 * leak)

    result = run_case(case, [provider("a", sums_all_keys)], CPU)
    assert result.runs[0].violations == ("lse: its bits depend on memory that the call does not use",)
    assert result.is_wrong


def test_one_that_writes_to_an_input_is_found() -> None:
    def writes(case: CrossCase, inputs: CrossInputs) -> Outputs:
        outputs = right(case, inputs)
        inputs.arguments["v"][0, 0] = 0
        return outputs

    result = run_case(CASE, [provider("a", writes)], CPU)
    assert result.runs[0].violations == ("v: memory outside what the call may write has changed",)


def test_broken_build_is_failed_and_a_missing_one_unavailable() -> None:
    def breaks(device: torch.device) -> None:
        raise RuntimeError("no rule to make kernels")

    entries = find_availability(
        [
            provider("a", prepare=breaks),
            provider("b", unavailable=lambda device: f"no compiler for {device}"),
            provider("c"),
        ],
        CPU,
    )
    assert [(entry.status, entry.reason) for entry in entries] == [
        ("failed", "RuntimeError: no rule to make kernels"),
        ("unavailable", "no compiler for cpu"),
        ("ready", ""),
    ]


def test_several_workers_give_what_one_gives() -> None:
    cases = draw_cross_cases(8, 1)
    one, two = (list(run_cases(cases, ["torch_native"], CPU, workers=count)) for count in (1, 2))
    assert [result.case for result in two] == cases
    assert [_round(result) for result in one] == [_round(result) for result in two]


def _round(result: CaseResult) -> list[tuple[str, str, bool, float]]:
    """What does not depend on how many threads torch sums with."""
    return [(pair.a, pair.b, pair.is_over, pair.tolerance) for pair in result.pairs]


class Command:
    """The command with implementations of a test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def run(self, providers: Sequence[CrossProvider], *arguments: str) -> Result:
        for module in (cross_run, cross_providers):
            self._monkeypatch.setattr(module, "list_cross_providers", lambda: tuple(providers))
        common = ("cross", "--device", "cpu", "--workers", "1", "--op", "attn_decode", "--random", "8")
        return CliRunner().invoke(bench, [*common, *arguments])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


def last_object(result: Result) -> dict[str, Any]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    document: dict[str, Any] = json.loads(lines[-1])
    return document


def test_agreement_is_status_0_and_the_last_line_is_json(command: Command) -> None:
    result = command.run([provider("triton"), provider("cuda_mma", why_not=lambda case: "takes no call")])
    assert result.exit_code == 0, result.output
    assert "triton / float64" in result.stdout
    assert "takes no call" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["bench"] == "cross"
    assert (document["calls_wrong"], document["pairs_over"], document["is_wrong"]) == (0, 0, False)
    assert document["calls"] == document["pairs"] > 8
    assert document["results"] == []
    assert {"python", "torch"} <= document["versions"].keys()


def test_one_far_off_is_status_1_and_marked_in_the_table(command: Command) -> None:
    def only_f32(out: torch.Tensor) -> torch.Tensor:
        return out * 1.1 if out.dtype == torch.float32 else out

    result = command.run([provider("triton", spoiled(only_f32))], "--brief")
    assert result.exit_code == 1
    assert "! over tolerance" in result.stdout
    assert "calls are wrong" in result.output
    document = last_object(result)
    assert {entry["case"]["dtype"] for entry in document["results"]} == {"float32"}
    assert document["pairs_over"] == len(document["results"]) > 0


def test_one_that_raises_is_status_1(command: Command) -> None:
    result = command.run([provider("triton"), provider("cuda_scalar", raises)])
    assert result.exit_code == 1
    assert "! RuntimeError: launch failed" in result.stdout


def test_required_and_missing_is_status_1_with_the_reason(command: Command) -> None:
    absent = provider("cuda_mma", unavailable=lambda device: "no g++ here")
    assert command.run([provider("triton"), absent]).exit_code == 0
    result = command.run([provider("triton"), absent], "--require", "triton,cuda_mma")
    assert result.exit_code == 1
    assert "required but missing: cuda_mma (no g++ here)" in result.output
    assert last_object(result)["missing"] == ["cuda_mma"]


def test_nothing_to_compare_is_status_1(command: Command) -> None:
    result = command.run([provider("triton", unavailable=lambda device: "not installed")])
    assert result.exit_code == 1
    assert "nothing was compared" in result.output


def test_json_file_lists_every_call_and_what_is_not_finite_as_null(command: Command, tmp_path: Path) -> None:
    def not_finite(out: torch.Tensor) -> torch.Tensor:
        out[0] = math.nan
        return out

    path = tmp_path / "cross.json"
    result = command.run([provider("triton", spoiled(not_finite))], "--json", str(path), "--seed", "9")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["seed"], document["random"], document["format"]) == (9, 8, 1)
    assert len(document["results"]) == document["calls"]
    assert document["providers"] == [{"provider": "triton", "status": "ready", "reason": ""}]
    entry = document["results"][0]
    assert entry["op"] == "attn_decode"
    assert entry["pairs"][0]["relative"] is None
    assert entry["pairs"][0]["is_over"] is True
    assert entry["pairs"][0].keys() == {
        "a", "b", "absolute", "relative", "ulp", "lse", "tolerance", "is_over"
    }  # fmt: skip
    assert (
        entry["runs"][0]["violations"] == ["empty rows: wanted 0 where no key is seen"]
        or not entry["runs"][0]["violations"]
    )
    assert result.exit_code == 1


def test_json_file_that_cannot_be_written_is_one_line(command: Command, tmp_path: Path) -> None:
    result = command.run([provider("triton")], "--json", str(tmp_path / "no" / "where.json"))
    assert result.exit_code == 1
    assert "--json" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--op", "attn_sideways"], "--op: wanted one of"), (["--require", "rocm"], "wanted some of triton")],
)
def test_bad_argument_is_a_usage_error(command: Command, arguments: list[str], text: str) -> None:
    result = command.run([provider("triton")], *arguments)
    assert result.exit_code == 2
    assert text in result.output
