"""``astrai replay``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from astrai_server import loading
from astrai_server.cli import main
from astrai_server.config import Settings
from astrai_server.device import Placement
from astrai_server.loading import LoadedModel
from astrai_triton.engine import SamplingParams
from astrai_triton.engine.trace import StepTrace
from drive import build_engine, run_all
from fakes import ByteTokenizer, Context, ScriptedModel, hash_script


def other_script(context: Context) -> int:
    """Agrees with ``hash_script`` up to 8 tokens."""
    return hash_script(context) if len(context) < 8 else 97


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Settings]]:
    """Make ``load_model`` give a scripted model; returns what it was asked for."""

    def install(**options: Any) -> list[Settings]:
        seen: list[Settings] = []

        def load_model(settings: Settings, audience: Any) -> LoadedModel:
            seen.append(settings)
            placement = Placement(torch.device("cpu"), torch.float32, "")
            model: Any = ScriptedModel(**options)
            tokenizer: Any = ByteTokenizer()
            return LoadedModel("scripted", model, tokenizer, placement)

        monkeypatch.setattr(loading, "load_model", load_model)
        return seen

    return install


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two tasks, one of which has not ended."""
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(observer=StepTrace(file))
        engine.submit(list(b"abcde"), SamplingParams(temperature=0.0, max_tokens=6))
        run_all(engine)
        engine.submit(list(b"xyz"), SamplingParams(temperature=0.0, max_tokens=50))
        for _ in range(3):
            engine.step()
    return path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["replay", *args], prog_name="astrai")


def test_a_trace_that_comes_out_the_same_is_status_0(trace: Path, load: Callable[..., Any]) -> None:
    load()
    result = invoke(str(trace))
    assert result.exit_code == 0, result.output
    num_steps = len(trace.read_text().splitlines()) - 1
    assert result.stdout.splitlines() == [f"steps       {num_steps}", "difference  none", "open tasks  1"]


def test_the_first_difference_is_shown_and_is_status_1(trace: Path, load: Callable[..., Any]) -> None:
    load(script=other_script)
    result = invoke(str(trace))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    line = int(lines[1].split()[2].rstrip(","))
    recorded = json.loads(trace.read_text().splitlines()[line - 1])["sampled"]
    assert lines[1] == f"difference  line {line}, sampled"
    assert lines[2] == f"  recorded  {recorded}"
    assert lines[3] == "  replayed  [[0, 97]]"
    assert lines[-1] == "open tasks  0"
    assert "Error" not in result.stderr


def test_a_long_difference_is_cut(trace: Path, load: Callable[..., Any]) -> None:
    load()
    lines = trace.read_text().splitlines()
    step = json.loads(lines[1])
    step["sampled"] = [[0, 97]] * 100
    trace.write_text("\n".join([lines[0], json.dumps(step), *lines[2:]]))
    assert max(len(line) for line in invoke(str(trace)).stdout.splitlines()) < 220


def test_the_model_and_how_it_is_loaded_are_given_as_to_serve(
    trace: Path, load: Callable[..., list[Settings]], tmp_path: Path
) -> None:
    config = tmp_path / "s.yaml"
    config.write_text("server:\n  device: cpu\n  trace_file: live.jsonl\n  cuda_graphs: true\n")
    seen = load()
    assert invoke(str(trace), "some/model", "-c", str(config), "--dtype", "float32").exit_code == 0
    server = seen[0].server
    assert (server.param_path, server.dtype, server.device) == ("some/model", "float32", "cpu")
    assert server.cuda_graphs is None
    assert not (tmp_path / "live.jsonl").exists()


def assert_fails(result: Result, text: str) -> None:
    assert result.exit_code == 1
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_trace_that_is_not_there_fails_before_the_model_is_loaded(
    load: Callable[..., list[Settings]], tmp_path: Path
) -> None:
    seen = load()
    assert_fails(invoke(str(tmp_path / "none")), "No such file or directory")
    assert_fails(invoke(str(tmp_path)), "Is a directory")
    assert seen == []


def test_what_is_no_trace_is_refused(load: Callable[..., Any], tmp_path: Path) -> None:
    load()
    path = tmp_path / "t"
    path.write_text("hello\n")
    assert_fails(invoke(str(path)), f"{path}:1: wanted a JSON object, got 'hello")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda first, step: first["sizes"].update(max_seq_len=9999), "max_seq_len: wanted 1 to 4096"),
        (lambda first, step: first["sizes"].update(colour=1), "unexpected keyword argument 'colour'"),
        (
            lambda first, step: step["arrived"][0]["prompt_ids"].append(300),
            "prompts[0]: wanted ids in 0..259",
        ),
        (lambda first, step: step["arrived"][0].pop("key"), "no entry 'key'"),
        (lambda first, step: step.update(cancelled=[7]), "no entry 7"),
    ],
)
def test_a_trace_that_does_not_fit_the_model_is_refused_with_the_reason(
    trace: Path, load: Callable[..., Any], edit: Callable[[Any, Any], Any], reason: str
) -> None:
    load()
    first, step, *rest = trace.read_text().splitlines()
    parsed = json.loads(first), json.loads(step)
    edit(*parsed)
    trace.write_text("\n".join([*map(json.dumps, parsed), *rest]))
    result = invoke(str(trace))
    assert_fails(result, f"{trace}: cannot be replayed with scripted: ")
    assert reason in result.stderr
