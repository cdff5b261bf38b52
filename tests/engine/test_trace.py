from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.engine.trace import StepTrace, replay
from astrai_triton.errors import TraceError
from drive import build_engine, run_all
from fakes import ByteTokenizer, Context, ScriptedModel


def write_trace(path: Path, model: ScriptedModel | None = None, **sizes: Any) -> None:
    """A busy hour in small: arrivals, cancels and preemptions in a tight pool."""
    rng = random.Random(3)
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(model or ScriptedModel(spread=7.0), observer=StepTrace(file), **sizes)
        handles = []
        for _ in range(30):
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randrange(1, 20),
                logit_bias=rng.choice([{}, {98: -3.0}]),
                stop=rng.choice([(), ("q",)]),
            )
            prompt = [rng.randrange(97, 100) for _ in range(rng.randrange(1, 30))]
            key, salt, n = rng.choice("ab"), rng.choice([None, "s"]), rng.choice([1, 1, 3])
            handles += engine.submit_many([prompt], params, n=n, key=key, salt=salt)
            if rng.random() < 0.3:
                rng.choice(handles).cancel()
            for _ in range(rng.randrange(3)):
                engine.step()
        run_all(engine)
        assert engine.get_stats()["preemptions"] > 0


TIGHT: dict[str, Any] = {"n_tokens": 80, "max_batch_size": 6, "max_step_tokens": 24}


@pytest.mark.parametrize("policy", ["budget", "fcfs"])
def test_a_replay_takes_the_same_steps(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, **TIGHT, policy=policy)
    result = replay(path, ScriptedModel(spread=7.0), ByteTokenizer())
    assert result.difference is None
    assert result.open_tasks == ()
    assert result.num_steps == len(path.read_text().splitlines()) - 1 > 50


def test_a_replay_stops_at_the_first_step_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, **TIGHT)

    def other_script(context: Context) -> int:
        return 120 if len(context) == 25 else 97 + sum(context) % 26

    result = replay(path, ScriptedModel(other_script), ByteTokenizer())
    assert result.difference is not None
    assert result.difference.kind == "sampled"
    assert result.difference.recorded != result.difference.replayed
    recorded = json.loads(path.read_text().splitlines()[result.difference.line - 1])
    assert recorded["sampled"] == result.difference.recorded


def test_a_trace_that_ends_with_open_tasks_names_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(observer=StepTrace(file))
        engine.submit([97], SamplingParams(temperature=0.0, max_tokens=1))
        engine.submit([98], SamplingParams(temperature=0.0, max_tokens=50))
        for _ in range(5):
            engine.step()
    result = replay(path, ScriptedModel(), ByteTokenizer())
    assert result.difference is None
    assert result.open_tasks == (1,)


def test_arrival_numbers_of_refused_tasks_leave_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(observer=StepTrace(file), max_queue=1)
        for i in range(3):
            try:
                engine.submit([97 + i], SamplingParams(temperature=0.0, max_tokens=3))
            except Exception:  # noqa: BLE001 - the queue holds one
                assert i > 0
        engine.step()
        engine.submit([99], SamplingParams(temperature=0.0, max_tokens=3))
        run_all(engine)
    result = replay(path, ScriptedModel(), ByteTokenizer())
    assert (result.difference, result.open_tasks) == (None, ())


def test_choices_fork_in_a_replay_as_they_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(ScriptedModel(spread=7.0), observer=StepTrace(file), max_step_tokens=16)
        prompts = [list(b"a prompt of several pages"), list(b"abc"), list(b"another prompt of pages")]
        engine.submit_many(prompts, SamplingParams(max_tokens=5), n=3)
        engine.submit([97], SamplingParams(max_tokens=5))
        run_all(engine)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The second prompt is shorter than a page: nothing is shared, nobody waits.
    leaders = [task["leader"] for task in lines[1]["arrived"]]
    assert leaders == [None, 0, 0, None, None, None, None, 6, 6, None]
    result = replay(path, ScriptedModel(spread=7.0), ByteTokenizer())
    assert (result.difference, result.open_tasks) == (None, ())


def test_a_trace_from_before_there_were_choices_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(observer=StepTrace(file))
        engine.submit(list(b"a prompt"), SamplingParams(temperature=0.0, max_tokens=3))
        run_all(engine)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for task in lines[1]["arrived"]:
        del task["leader"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = replay(path, ScriptedModel(), ByteTokenizer())
    assert (result.difference, result.open_tasks) == (None, ())


def test_a_running_engine_is_traced_from_its_thread(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    sizes: dict[str, Any] = {"max_batch_size": 4, "n_tokens": 256, "page_size": 4, "max_seq_len": 64}
    with (
        path.open("w", encoding="utf-8") as file,
        InferenceEngine(ScriptedModel(), ByteTokenizer(), observer=StepTrace(file), **sizes) as engine,
    ):
        engine.generate(["one", "two", "three", "four", "five"], temperature=0.7, max_tokens=9)
    assert replay(path, ScriptedModel(), ByteTokenizer()).difference is None


def test_a_full_disk_ends_the_trace_and_not_the_step() -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError("no space left on device")

    engine = build_engine(observer=StepTrace(FullDisk()))
    engine.submit([97], SamplingParams(temperature=0.0, max_tokens=4))
    assert run_all(engine) > 0


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", "[1]\n", '{"trace": 99, "sizes": {}}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=str(path)):
        replay(path, ScriptedModel(), ByteTokenizer())
