from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from astrai_bench import measure, providers
from astrai_bench.cases import OPS, PROVIDERS, Case, Ceilings
from astrai_bench.cli import bench
from astrai_bench.inputs import DenseInputs, Inputs
from astrai_bench.providers import Call, Provider, list_providers

TINY = [
    "--batch",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "16",
    "--repeats",
    "3",
    "--device",
    "cpu",
]
SIZES = {
    "decode": ["--kv-len", "33"],
    "prefill": ["--q-len", "9", "--kv-len", "17"],
    "paged-decode": ["--kv-len", "33,7", "--page", "4"],
    "paged-prefill": ["--q-len", "9,3", "--kv-len", "17,3", "--page", "4"],
    "rotary": ["--q-len", "9"],
}
RUNS_ANYWHERE = {
    "decode": "torch_sdpa",
    "prefill": "torch_sdpa",
    "paged-decode": "torch_native",
    "paged-prefill": "torch_native",
    "rotary": "torch_native",
}


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes longer than everything else here; test_timing looks at how they are measured."""
    monkeypatch.setattr(
        measure,
        "measure_ceilings",
        lambda device, dtype: Ceilings(bandwidth=1e10, flops=1e11, source="made up"),
    )


def invoke(*args: str) -> Result:
    return CliRunner().invoke(bench, args)


def run(op: str, *args: str) -> Result:
    return invoke(op, *TINY, *SIZES[op], *args)


def last_line(result: Result) -> dict[str, Any]:
    document = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_a_bench_ends_in_one_json_object(op: str, dtype: str) -> None:
    provider = RUNS_ANYWHERE[op]
    result = run(op, "--backend", provider, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    document = last_line(result)
    assert document["bench"] == document["case"]["op"] == op
    (row,) = document["rows"]
    assert (row["provider"], row["status"]) == (provider, "timed")
    assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert row["error"] <= document["check"]["tolerance"]
    assert provider in result.stdout
    assert document["prediction"]["us"] > 0


def test_providers_that_cannot_run_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = run("paged-decode")
    rows = {row["provider"]: row for row in last_line(result)["rows"]}
    assert tuple(rows) == PROVIDERS
    assert rows["torch_native"]["status"] == "timed"
    assert "TRITON_INTERPRET=1" in rows["triton"]["reason"]
    assert "CUDA reference" in rows["cuda_ref"]["reason"]
    assert "dense K and V only" in rows["flex_attention"]["reason"]
    for row in rows.values():
        assert row["status"] == "timed" or row["reason"] in result.stdout.replace("\n", "")


def spoil(provider: Provider, how: str) -> Provider:
    def prepare(case: Case, inputs: Inputs) -> Call:
        assert provider.prepare is not None
        call = provider.prepare(case, inputs)

        def wrong() -> torch.Tensor:
            if how == "raise":
                raise RuntimeError("the kernel\nexploded")
            out = call()
            assert isinstance(out, torch.Tensor)
            return out.clone().index_fill_(-1, torch.tensor([3]), torch.nan if how == "nan" else 7.0)

        return wrong

    return Provider(name=provider.name, why_not=provider.why_not, prepare=prepare, capturable=False)


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("off", "wrong", "not timed: its result is off by"),
        ("nan", "wrong", "NaN or Inf"),
        ("raise", "failed", "RuntimeError: the kernel exploded"),
    ],
)
def test_a_provider_that_is_wrong_is_not_timed(
    how: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = tuple(
        spoil(provider, how) if provider.name == "torch_sdpa" else provider for provider in list_providers()
    )
    monkeypatch.setattr(providers, "list_providers", lambda: spoiled)
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: pytest.fail("timed all the same"))
    result = run("decode", "--backend", "torch_sdpa")
    assert result.exit_code == 1
    assert "wrong or failed, see the table: torch_sdpa" in result.stderr
    (row,) = last_line(result)["rows"]
    assert row["status"] == status
    assert text in row["reason"]
    assert status in result.stdout
    assert "median_us" not in row


def test_the_interpreter_is_timed_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(case: Case, inputs: Inputs) -> Call:
        assert isinstance(inputs, DenseInputs)
        expected = next(provider for provider in list_providers() if provider.name == "torch_sdpa").prepare
        assert expected is not None
        return expected(case, inputs)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(providers, "_prepare_triton", prepare)
    (row, *_) = last_line(run("decode", "--backend", "torch_sdpa", "--backend", "triton"))["rows"]
    assert (row["label"], row["status"]) == ("triton (interpreter)", "timed")
    rows = {row["provider"]: row for row in last_line(run("paged-decode"))["rows"]}
    assert rows["triton"]["status"] == "skipped"
    assert "--backend triton" in rows["triton"]["reason"]


def test_nothing_that_could_be_timed_is_a_failure() -> None:
    result = run("decode", "--backend", "cuda_ref")
    assert result.exit_code == 1
    assert "no provider could be timed" in result.stderr
    assert last_line(result)["rows"][0]["status"] == "unavailable"


def test_a_cpu_says_which_sizes_it_made_smaller() -> None:
    result = invoke("decode", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--repeats", "1",
                    "--device", "cpu", "--backend", "torch_sdpa")  # fmt: skip
    assert "smaller than on a GPU where nothing was given: batch 4, kv-len 1024" in result.stdout
    assert last_line(result)["case"]["kv_lens"] == [1024] * 4


def test_two_runs_can_be_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    for path in (a, b):
        result = run("rotary", "--backend", "torch_native", "--json", str(path))
        assert json.loads(path.read_text(encoding="utf-8")) == last_line(result)
    result = invoke("rotary", "--compare", str(a), str(b))
    assert result.exit_code == 0, result.output
    assert "B / A" in result.stdout
    assert last_line(result)["rows"][0]["ratio"] > 0
    refused = invoke("decode", "--compare", str(a), str(b))
    assert refused.exit_code == 1
    assert "wanted a result of decode, got one of rotary" in refused.stderr


def test_a_json_file_that_cannot_be_written_loses_no_result(tmp_path: Path) -> None:
    result = run("rotary", "--backend", "torch_native", "--json", str(tmp_path / "none" / "a.json"))
    assert result.exit_code == 1
    assert "--json" in result.stderr
    assert last_line(result)["bench"] == "rotary"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["decode", "--heads", "5"], "q_heads: wanted a multiple of kv_heads=8, got 5"),
        (["decode", "--kv-len", "1,2"], "use paged-decode"),
        (["decode", "--kv-len", "0"], "wanted a length, or several with commas between, got '0'"),
        (["paged-decode", "--kv-len", "4,x"], "got '4,x'"),
        (["prefill", "--q-len", "9", "--kv-len", "4"], "kv_lens: wanted at least the q_len"),
        (["decode", "--page", "4"], "No such option"),
        (["rotary", "--kv-len", "4"], "No such option"),
        (["decode", "--backend", "cudnn"], "'cudnn' is not one of"),
        (["decode", "--dtype", "int8"], "'int8' is not one of"),
        (["decode", "--device", "tpu"], "--device: wanted auto, cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_wrong_usage_is_status_2(args: list[str], text: str) -> None:
    result = invoke(*args) if "--device" in args else invoke(*args, "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert text in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    result = invoke("decode", "--device", "cuda")
    assert result.exit_code == 2
    assert "wanted a GPU that torch can use, got 'cuda' but there is none" in result.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from astrai_bench.cli import bench; "
        "bench(['decode', '--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--compare A B" in done.stdout
