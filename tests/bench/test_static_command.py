"""``astrai bench static`` over the library's own kernels, compiled for sm_90."""

from __future__ import annotations

import json

import attrs
import pytest
from click.testing import CliRunner, Result

from astrai_bench import compilation
from astrai_bench.static import KernelReport
from astrai_bench.static_rules import Fault
from astrai_server.cli import main


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "static", *arguments])


def test_the_table_has_a_row_per_kernel_and_counts_faults() -> None:
    result = _run("--arch", "sm_90", "--variant", "merge_states_h32_d128_*")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["variant", "arch", "regs"]
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["merge_states_h32_d128_bf16", "sm_90"],
        ["merge_states_h32_d128_fp32", "sm_90"],
    ]
    assert lines[-1].startswith("2 variants, 2 kernels, Triton ")


def test_a_check_of_kernels_with_a_fault_ends_with_status_1_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = KernelReport(variant="decode_x", arch="sm_90", triton="3.9.0", registers=88)
    bad = attrs.evolve(good, arch="sm_80", faults=(Fault("spill", "8 bytes spill"),))
    reports = [good]
    monkeypatch.setattr(compilation, "collect_reports", lambda *args, **options: reports)
    done = _run("--check")
    assert (done.exit_code, done.stdout) == (0, "1 variants, 1 kernels, Triton 3.9.0, faults: none\n")
    reports.append(bad)
    done = _run("--check")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "spill: 8 bytes spill (decode_x on sm_80)",
        "1 variants, 2 kernels, Triton 3.9.0, faults: 1",
    ]
    assert _run().exit_code == 0


def test_served_attention_keeps_its_promises_on_hopper() -> None:
    result = _run(
        "--arch", "sm_90", "--json",
        "--variant", "decode_paged_split_h32_8_d128_128_bf16", "--variant", "prefill_paged_g4_d128_bf16",
    )  # fmt: skip
    decode, prefill = json.loads(result.stdout)
    for report in (decode, prefill):
        assert report["spill_bytes"] == 0
        assert report["faults"] == []
        assert report["tiles_in_flight"] >= 2
        # 4.3 TB/s x the latency of memory over 132 multiprocessors.
        assert report["bytes_in_flight"] >= 32 * 1024
    assert prefill["mma"] == ["wgmma"]


def test_a_call_is_explained_with_its_grid_and_its_roofline_time() -> None:
    result = _run("--explain", "paged-decode", "--batch", "16", "--kv-len", "4096", "--json")
    (explanation,) = json.loads(result.stdout)
    attend, merge = explanation["launches"]
    assert attend["report"]["variant"] == "decode_paged_split_h32_8_d128_128_bf16"
    assert attend["is_listed"] is True
    assert attend["grid"][:2] == [16, 8]
    assert attend["ctas"] == 16 * 8 * attend["grid"][2]
    assert attend["waves"] == pytest.approx(attend["ctas"] / (attend["report"]["resident_ctas"] * 132))
    assert merge["report"]["variant"].startswith("merge_splits_")
    assert explanation["is_memory_bound"] is True
    # 16 requests x 4096 keys x 8 heads x 128 x K and V x 2 bytes, and 16 rows of q and of the output.
    assert explanation["bytes"] == 16 * 4096 * 8 * 128 * 2 * 2 + 2 * 16 * 32 * 128 * 2
    assert explanation["seconds"] == pytest.approx(explanation["bytes"] / 4.3e12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "'sm_75' is not one of"),
        (["--explain", "rotary"], "'rotary' is not one of"),
        (["--explain", "decode", "--check"], "leave out --check and --variant"),
        (["--explain", "decode", "--heads", "30"], "q_heads: wanted a multiple of kv_heads=8, got 30"),
        (["--explain", "prefill", "--q-len", "64", "--kv-len", "32"], "kv_lens: wanted at least the q_len"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_pattern_without_a_match_is_one_line() -> None:
    result = _run("--arch", "sm_90", "--variant", "no_such_*")
    assert result.exit_code == 1
    assert result.stderr == ("Error: variant: wanted a pattern that matches a variant, got 'no_such_*'\n")
