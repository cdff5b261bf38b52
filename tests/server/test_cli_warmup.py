"""``astrai warmup``: what it asks of the loading, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from astrai_server import loading
from astrai_server.cli import main
from astrai_server.config import Settings
from astrai_server.terminal import LoadDisplay
from astrai_triton.engine import InferenceEngine
from fakes import ByteTokenizer, Context, ScriptedModel


@attrs.define
class Loads:
    """What was loaded, and what its model has read."""

    settings: list[Settings] = attrs.field(factory=list)
    missing: list[loading.Missing] = attrs.field(factory=list)
    contexts: list[Context] = attrs.field(factory=list)
    error: Exception | None = None

    def forward(self, contexts: list[Context]) -> None:
        self.contexts += contexts
        if self.error is not None:
            raise self.error


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    seen = Loads()

    def load(settings: Settings, audience: LoadDisplay, *, missing: loading.Missing) -> InferenceEngine:
        seen.settings.append(settings)
        seen.missing.append(missing)
        audience.say("model    scripted")
        return InferenceEngine(ScriptedModel(on_forward=seen.forward), ByteTokenizer(), max_seq_len=100)

    monkeypatch.setattr(loading, "load_engine", load)
    return seen


def warm_up(*args: Any) -> Result:
    return CliRunner().invoke(main, ["warmup", *map(str, args)], prog_name="astrai")


def test_a_prompt_is_answered_with_everything_built(loads: Loads) -> None:
    result = warm_up("some/model", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert loads.missing == ["build"]
    assert loads.settings[0].server.param_path == "some/model"
    assert loads.settings[0].server.dtype == "float32"
    # A prefill and some decode steps.
    assert len(loads.contexts) > 2
    assert "warm     after" in result.stderr
    assert result.stdout == ""


def test_quiet_says_nothing(loads: Loads) -> None:
    assert warm_up("-q").stderr == ""


def test_no_trace_is_written(loads: Loads, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"server:\n  trace_file: {tmp_path / 'trace'}\n")
    assert warm_up("-c", config).exit_code == 0
    assert loads.settings[0].server.trace_file is None


def test_a_model_that_cannot_answer_is_an_error(loads: Loads) -> None:
    loads.error = RuntimeError("no such kernel")
    result = warm_up()
    assert result.exit_code == 1
    assert "no such kernel" in result.stderr
    assert "Traceback" not in result.stderr
