"""Every check of the static report, on tiny kernels compiled for sm_90 in processes of their own."""

from __future__ import annotations

import tempfile

import attrs
import pytest

from astrai_bench.compilation import Worker, collect_reports, read_report
from astrai_bench.errors import BenchError
from astrai_bench.static import KernelReport, describe_refusal
from astrai_bench.static_table import list_faults

TOYS = ("toy_kernels",)


@pytest.fixture(scope="module")
def reports() -> dict[str, KernelReport]:
    return {report.variant: report for report in collect_reports(families=TOYS, capabilities=[90])}


def test_a_kernel_that_keeps_every_rule_has_no_fault(reports: dict[str, KernelReport]) -> None:
    assert [reports[name].faults for name in ("copy_wide", "walk_wide", "attend_mma")] == [(), (), ()]


def test_the_report_says_what_the_compiler_made(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_mma"]
    assert report.arch == "sm_90"
    assert 32 < report.registers <= 255
    assert report.mma == ("wgmma",)
    assert report.loads == {"128": report.loads["128"]}
    # One tile of 64 x 64 bf16 and two products of 64 x 64 x 64 a turn.
    assert report.tile_bytes == 64 * 64 * 2
    assert report.tile_flops == 2 * (2 * 64**3)


def test_tiles_in_flight_are_stages_less_one_and_lie_in_shared_memory(
    reports: dict[str, KernelReport],
) -> None:
    report = reports["attend_mma"]
    assert report.num_stages == 3
    assert report.tiles_in_flight == 2
    assert report.shared_bytes >= report.ring_bytes >= 2 * report.tile_bytes
    assert report.bytes_in_flight == 2 * report.tile_bytes * report.resident_ctas


def test_an_address_product_of_32_bits_is_a_fault(reports: dict[str, KernelReport]) -> None:
    faults = reports["copy_narrow"].faults
    assert [fault.kind for fault in faults] == ["address"]
    assert "toy_kernels.py:" in faults[0].text
    assert "a loaded value x an argument" in faults[0].text


def test_a_narrow_product_is_followed_through_loops_and_branches(reports: dict[str, KernelReport]) -> None:
    assert [fault.kind for fault in reports["carry_narrow"].faults] == ["address"]


def test_a_spill_is_a_fault(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_spilling"]
    assert report.spill_bytes > 0
    assert "spill" in {fault.kind for fault in report.faults}


def test_64_rows_that_one_warp_computes_without_wgmma_are_a_fault(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_spilling"]
    assert (report.num_warps, report.mma) == (1, ("mma.sync",))
    assert "mma" in {fault.kind for fault in report.faults}


def test_a_dot_of_16_bit_inputs_without_mma_is_a_fault(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_ieee"]
    assert report.mma == ()
    assert {fault.kind for fault in report.faults} == {"mma"}
    assert "16x64 f32 by 64x16 f32" in report.faults[0].text


def test_more_shared_memory_than_the_architecture_has_is_a_fault(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_deep"]
    assert report.shared_bytes > 227 * 1024
    assert report.resident_ctas == 0
    assert [fault.kind for fault in report.faults] == ["shared"]


def test_a_pipeline_that_leaves_stages_unused_is_a_fault(reports: dict[str, KernelReport]) -> None:
    report = reports["attend_slots"]
    assert (report.tiles_in_flight, report.num_stages) == (1, 3)
    assert [fault.kind for fault in report.faults] == ["pipeline"]


def test_what_the_compiler_refuses_is_a_fault_with_its_reason(reports: dict[str, KernelReport]) -> None:
    (fault,) = reports["attend_unknown_type"].faults
    assert fault.kind == "compile"
    assert "fp8e4b8 not supported" in fault.text


def test_a_refusal_of_ptxas_is_told_by_its_reason_and_not_by_its_command() -> None:
    printed = """PTXAS error
ptxas kernel.ptx, line 469; error   : Feature 'mul.bf16x2' requires .target sm_90 or higher
ptxas kernel.ptx, line 470; error   : Feature 'mul.bf16x2' requires .target sm_90 or higher
ptxas fatal   : Ptx assembly aborted due to errors

Repro command: ptxas --gpu-name=sm_80 kernel.ptx
"""
    told = describe_refusal(RuntimeError(printed))
    assert told == "RuntimeError: Feature 'mul.bf16x2' requires .target sm_90 or higher"
    assert describe_refusal(ValueError("while compiling\n  the reason\n")) == "ValueError: the reason"
    assert describe_refusal(KeyError()) == "KeyError"


def test_a_report_survives_json(reports: dict[str, KernelReport]) -> None:
    assert all(read_report(attrs.asdict(report)) == report for report in reports.values())


def test_equal_faults_are_listed_once(reports: dict[str, KernelReport]) -> None:
    twice = [reports["copy_narrow"], attrs.evolve(reports["copy_narrow"], variant="copy_other")]
    (line,) = list_faults(twice)
    assert line.endswith("(copy_narrow on sm_90 and 1 more)")


def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(BenchError, match="wanted a pattern that matches a variant, got 'nothing_\\* none'"):
        collect_reports(["nothing_*", "none"], [90], families=TOYS)


def test_a_module_that_cannot_be_imported_is_an_error_that_says_so() -> None:
    with pytest.raises(BenchError, match="No module named 'no_such_kernels'"):
        collect_reports(capabilities=[90], families=("no_such_kernels",), num_workers=1)


def test_a_process_that_compiled_for_one_architecture_refuses_another() -> None:
    with tempfile.TemporaryFile() as errors:
        worker = Worker(TOYS, errors)
        try:
            assert worker.ask({"list": None, "capability": 80})["names"]
            worker.ask({"examine": "copy_wide", "capability": 90})
            assert worker.ask({"list": None, "capability": 80})["names"]
            with pytest.raises(BenchError, match=r"capability: wanted 90, .*, got 80; start another process"):
                worker.ask({"examine": "copy_wide", "capability": 80})
        finally:
            worker.close()
