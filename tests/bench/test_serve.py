from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from astrai_bench.cli import bench
from astrai_bench.errors import BenchError
from astrai_bench.load import Load, Run
from astrai_bench.protocols import Answer, Question, find_protocol
from astrai_bench.serve_plot import bin_tokens, plot_run
from astrai_bench.serve_report import build_document, describe_lines, describe_times, find_percentile
from scripted_server import Script, serve_script


def invoke(script: Script, *options: str) -> tuple[Result, dict[str, Any]]:
    with serve_script(script) as url:
        command = ["serve", url, "--clients", "2", "--num-requests", "4", "--max-tokens", "3", *options]
        result = CliRunner().invoke(bench, command)
    last = result.output.splitlines()[-1] if result.output else ""
    return result, json.loads(last) if last.startswith("{") else {}


def make_answer(first_s: float, *gaps_s: float, sent_s: float = 0.0, **changes: Any) -> Answer:
    chunks = [sent_s + first_s]
    for gap in gaps_s:
        chunks.append(chunks[-1] + gap)
    fields = {
        "output_tokens": len(chunks),
        "input_tokens": 10,
        "max_tokens": len(chunks),
        "done_s": chunks[-1],
    }
    return Answer(sent_s=sent_s, chunks_s=chunks, **(fields | changes))


def make_run(*answers: Answer, ended_s: float = 2.0, cpu_s: float = 0.01) -> Run:
    return Run(
        answers=answers,
        started_s=0.0,
        ended_s=ended_s,
        cpu_s=cpu_s,
        lags_s=(0.001,),
        late_s=(),
        num_words=8,
    )


LOAD = Load(
    url="http://127.0.0.1:1",
    protocol=find_protocol("chat"),
    question=Question(model="m", max_tokens=3, temperature=0.0, ignore_eos=True),
    num_requests=2,
    clients=2,
)


def test_the_last_line_is_json_and_goes_to_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    result, document = invoke(Script(), "--json", str(path), "--slo-ttft-ms", "60000")
    assert result.exit_code == 0, result.output
    assert document == json.loads(path.read_text())
    assert (document["bench"], document["load"]["model"]) == ("serve", "scripted")
    assert document["requests"] == {
        "sent": 4,
        "answered": 4,
        "failed": 0,
        "errors": {},
        "example": None,
        "shorter_than_max_tokens": 0,
    }
    assert document["tokens"]["output"] == 12
    assert document["goodput"]["requests"] == 4
    assert document["output_tok_s"] == pytest.approx(12 / document["wall_s"], rel=0.01)
    for times in document["latency"].values():
        assert 0 <= times["p50"] <= times["p90"] <= times["p99"] <= times["max"]


def test_failures_beyond_the_share_allowed_exit_with_1() -> None:
    script = Script(statuses={2: 500})
    result, document = invoke(script, "--warmup", "0", "--max-error-share", "0.2")
    assert (result.exit_code, document["requests"]["errors"]) == (1, {"status 500": 1})
    assert "failed: 1 × status 500; e.g." in result.output
    script = Script(statuses={2: 500})
    result, _ = invoke(script, "--warmup", "0", "--max-error-share", "0.25")
    assert result.exit_code == 0


def test_ignore_eos_and_key_are_sent_and_the_model_may_be_named() -> None:
    script = Script()
    result, _ = invoke(script, "--ignore-eos", "--model", "other", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert all(body["ignore_eos"] is True and body["model"] == "other" for body in script.bodies)
    assert {headers["Authorization"] for headers in script.headers} == {"Bearer secret"}


def test_prompts_are_others_each_time_unless_a_seed_is_named() -> None:
    def list_prompts(*options: str) -> list[str]:
        script = Script()
        result, document = invoke(script, *options)
        assert result.exit_code == 0, result.output
        assert isinstance(document["load"]["seed"], int)
        return [body["messages"][0]["content"] for body in script.bodies]

    assert set(list_prompts("--clients", "1")).isdisjoint(list_prompts("--clients", "1"))
    first, second = (sorted(list_prompts("--seed", "7")) for _ in range(2))
    assert first == second


def test_a_base_with_v1_is_the_same_server() -> None:
    with serve_script(Script()) as url:
        command = ["serve", url + "/v1/", "--num-requests", "1", "--max-tokens", "1", "--clients", "1"]
        assert CliRunner().invoke(bench, command).exit_code == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["http://x", "--clients", "2", "--rate", "1"], "wanted one of them"),
        (["http://x", "--protocol", "anthropic", "--ignore-eos"], "the protocol anthropic has no such field"),
        (["127.0.0.1:8000"], "URL: wanted http://HOST:PORT"),
        (["http://127.0.0.1:9"], r"http://127\.0\.0\.1:9/v1/models: wanted a list of models"),
        (["http://x", "--model", "m", "--prompts", "/none.jsonl"], r"--prompts /none\.jsonl"),
        (["http://x", "--plot", "chart"], "--plot: wanted a file name ending in"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(options: list[str], text: str) -> None:
    result = CliRunner().invoke(bench, ["serve", *options])
    assert isinstance(result.exception, BenchError)
    with pytest.raises(BenchError, match=text):
        raise result.exception


def test_percentiles_are_linear_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [find_percentile(values, percent) for percent in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert find_percentile(values, 90) == pytest.approx(3.7)
    assert find_percentile([5.0], 99) == 5.0
    assert describe_times([]) is None


def test_latencies_are_of_answered_requests_only_and_in_milliseconds() -> None:
    failed = make_answer(9.0, error="timeout")
    document = build_document(LOAD, make_run(make_answer(0.1, 0.02, 0.04), failed), slo_ttft_ms=100.0001)
    latency = document["latency"]
    assert latency["ttft_ms"]["max"] == pytest.approx(100)
    assert (latency["itl_ms"]["p50"], latency["itl_ms"]["max"]) == (pytest.approx(30), pytest.approx(40))
    assert latency["tpot_ms"]["mean"] == pytest.approx(30)
    assert latency["latency_ms"]["max"] == pytest.approx(160)
    assert document["requests"]["failed"] == 1
    assert (document["tokens"]["output"], document["output_tok_s"], document["input_tok_s"]) == (3, 1.5, 5.0)
    assert document["goodput"] == {
        "slo_ttft_ms": 100.0001,
        "requests": 1,
        "requests_s": 0.5,
        "output_tok_s": 1.5,
    }


def test_chunks_of_several_tokens_are_told() -> None:
    answer = make_answer(0.1, 0.3, output_tokens=7, max_tokens=7)
    document = build_document(LOAD, make_run(answer))
    assert (document["tokens"]["counted_by"], document["tokens"]["per_chunk"]) == ("usage", 3.5)
    assert document["latency"]["itl_ms"]["max"] == pytest.approx(300)
    assert document["latency"]["tpot_ms"]["max"] == pytest.approx(50)
    by_chunks = make_answer(0.1, 0.1, output_tokens=None)
    assert build_document(LOAD, make_run(by_chunks))["tokens"]["counted_by"] == "chunks"
    both = build_document(LOAD, make_run(answer, by_chunks))
    assert both["tokens"]["counted_by"] == "usage and chunks"


def test_a_client_that_is_the_limit_says_so() -> None:
    busy = build_document(LOAD, make_run(make_answer(0.1), cpu_s=1.5))
    assert busy["client"]["cpu_share"] == 0.75
    assert any("the client may be the limit" in line for line in describe_lines(busy))
    idle = build_document(LOAD, make_run(make_answer(0.1), cpu_s=0.1))
    assert not any("the client may be the limit" in line for line in describe_lines(idle))


def test_a_run_without_any_answer_still_has_a_document() -> None:
    failed = Answer(sent_s=0.0, error="cannot connect", max_tokens=3)
    document = build_document(LOAD, make_run(failed), slo_ttft_ms=1.0)
    assert document["output_tok_s"] == 0
    assert set(document["latency"].values()) == {None}
    assert any("1 × cannot connect" in line for line in describe_lines(document))


def test_throughput_over_time_counts_every_token_once() -> None:
    answer = make_answer(0.1, 0.5, 0.6, output_tokens=6)
    starts, rates = bin_tokens(make_run(answer))
    assert (starts, rates) == ([0.0, 0.5, 1.0, 1.5], [4.0, 4.0, 4.0, 0.0])


class RecordingAxes:
    """Remembers what was drawn."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.drawn.append((name, args, options))


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> tuple[RecordingAxes, RecordingAxes]:
    """matplotlib is optional, so it is not there where the tests run."""
    made = (RecordingAxes(), RecordingAxes())

    class Figure:
        def __init__(self, **_: Any) -> None:
            pass

        def subplots(self, *_: int) -> tuple[RecordingAxes, RecordingAxes]:
            return made

        def suptitle(self, text: str, **_: Any) -> None:
            assert text == "a load"

        def savefig(self, path: Path) -> None:
            path.write_text("chart", encoding="utf-8")

    module = ModuleType("matplotlib.figure")
    module.Figure = Figure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return made


def test_a_chart_shows_shares_and_throughput(
    axes: tuple[RecordingAxes, RecordingAxes], tmp_path: Path
) -> None:
    path = tmp_path / "chart.png"
    plot_run(make_run(make_answer(0.1, 0.5, 0.6)), "a load", path)
    assert path.exists()
    curves = {options["label"]: args for name, args, options in axes[0].drawn if name == "step"}
    assert curves["between chunks"] == ([pytest.approx(500), pytest.approx(600)], [0.5, 1.0])
    assert set(curves) == {"first token", "between chunks", "request"}
    assert [args for name, args, _ in axes[1].drawn if name == "step"] == [
        ([0.0, 0.5, 1.0, 1.5, 2.0], [2.0, 2.0, 2.0, 0.0, 0.0])
    ]


@pytest.mark.usefixtures("axes")
def test_nothing_answered_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no request was answered"):
        plot_run(make_run(make_answer(0.1, error="timeout")), "a load", tmp_path / "chart.png")
