"""Another form of the model takes over between two steps."""

from __future__ import annotations

import attrs
import pytest
import torch

from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.errors import EngineUnavailableError
from drive import build_engine, finish, run_all
from fakes import Context, ScriptedModel, echo_script


def test_running_tasks_go_on_with_the_new_model_and_what_is_cached() -> None:
    script = echo_script("abcdefgh", 3)
    old, new = ScriptedModel(script), ScriptedModel(script)
    engine = build_engine(old)
    handle = engine.submit(list(b"xyz"), SamplingParams(temperature=0, max_tokens=8))
    for _ in range(3):
        engine.step()
    before = len(old.forwards)
    replaced = engine.replace_model(new)
    assert not replaced.done()
    assert finish(engine, [handle]) == [("abcdefgh", "length")]
    replaced.result(0)
    assert engine.model is new
    assert len(old.forwards) == before
    # Nothing is computed a second time.
    assert set(new.forwards) == {(1,)}


def test_a_replacement_waits_for_the_step_that_runs() -> None:
    seen: list[Context] = []
    new = ScriptedModel(on_forward=seen.extend)
    with build_engine(start=True) as engine:
        assert engine.generate("abc", temperature=0, max_tokens=3)
        engine.replace_model(new).result(10)
        assert not seen
        assert engine.generate("abc", temperature=0, max_tokens=3)
    assert seen


def other_config(model: ScriptedModel) -> None:
    model.config = attrs.evolve(model.config, vocab_size=model.config.vocab_size + 1)


def other_dtype(model: ScriptedModel) -> None:
    model.dtype = torch.bfloat16


def other_device(model: ScriptedModel) -> None:
    model.device = torch.device("meta")


@pytest.mark.parametrize(
    ("change", "name"), [(other_config, "config"), (other_dtype, "dtype"), (other_device, "device")]
)
def test_another_model_is_refused(change, name: str) -> None:
    model = ScriptedModel()
    change(model)
    engine = build_engine()
    with pytest.raises(ValueError, match=f"model: wanted the {name} of the old one, .*, got"):
        engine.replace_model(model)
    run_all(engine)
    assert engine.model is not model


def test_captured_steps_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    monkeypatch.setattr(engine, "graph_sizes", (1, 2))
    with pytest.raises(ValueError, match="captured; make the engine with cuda_graphs=False"):
        engine.replace_model(ScriptedModel())


def test_an_engine_that_was_shut_down_keeps_its_model() -> None:
    engine: InferenceEngine = build_engine()
    engine.shutdown()
    with pytest.raises(EngineUnavailableError):
        engine.replace_model(ScriptedModel())
