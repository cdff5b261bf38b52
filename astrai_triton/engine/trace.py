"""A record of every step, and its replay: what hung or went wrong in service becomes a unit test.

A trace is a file of JSON objects, one a line. The first names the sizes of the engine. Each of the others is
a step: what had arrived and been cancelled when it began, which tasks ran with how many tokens, what was
sampled, who was preempted and who ended. Tasks are named by their arrival number. A trace holds prompts: keep
it like one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import attrs

from astrai_triton.backend import attn_backend
from astrai_triton.engine.engine import InferenceEngine
from astrai_triton.engine.intake import TextCodec
from astrai_triton.engine.model import Model
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import FinishReason, TaskHandle
from astrai_triton.engine.runner import Chunk
from astrai_triton.engine.task import Task
from astrai_triton.errors import TraceError
from astrai_triton.grammar.spec import Grammar

logger = logging.getLogger("astrai.engine")

_VERSION = 1


class StepTrace:
    """Observes a stepper and writes a line for every step in which something happened.

    A file that cannot be written any more ends the trace, never the step.

    Args:
        file: text, written line by line; None writes nothing.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._step: dict[str, list[Any]] = {}

    def open(self, sizes: Mapping[str, Any]) -> None:
        """The engine was made with these keyword arguments."""
        self._write({"trace": _VERSION, "sizes": dict(sizes)})

    def begin(self, arrived: Sequence[Task], cancelled: Sequence[Task]) -> None:
        """A step begins."""
        self._step = {}
        for task in arrived:
            self._add("arrived", _describe_task(task))
        for task in cancelled:
            self._add("cancelled", task.arrival)

    def run(self, chunks: Sequence[Chunk]) -> None:
        """A forward is about to run."""
        self._add("ran", [[chunk.task.arrival, chunk.length] for chunk in chunks])

    def sample(self, task: Task, token_id: int) -> None:
        """A token was sampled."""
        self._add("sampled", [task.arrival, token_id])

    def preempt(self, task: Task) -> None:
        """A running task lost its place."""
        self._add("preempted", task.arrival)

    def end(self, task: Task, reason: FinishReason) -> None:
        """A task ended."""
        self._add("ended", [task.arrival, reason])

    def close_step(self) -> None:
        """The step is over."""
        if self._step:
            self._write(self._step)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _add(self, kind: str, item: Any) -> None:
        self._step.setdefault(kind, []).append(item)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except (OSError, ValueError):
            logger.exception("the trace ends here: its file cannot be written")
            self._file = None


@attrs.frozen
class Difference:
    """The first step of a replay that is not as it was recorded."""

    line: int
    """Of the trace file, from 1."""
    kind: str
    """``ran``, ``sampled``, ``preempted`` or ``ended``."""
    recorded: list[Any]
    replayed: list[Any]

    def __str__(self) -> str:
        return f"line {self.line}: {self.kind}: recorded {self.recorded}, replayed {self.replayed}"


@attrs.frozen
class Replay:
    """What came of a replay."""

    num_steps: int
    difference: Difference | None
    """None: every step was as recorded."""
    open_tasks: tuple[int, ...]
    """Arrival numbers of the tasks that had not ended at the end of the trace."""


def replay(path: Path, model: Model, tokenizer: TextCodec) -> Replay:
    """Run a trace again, step by step, up to the first difference.

    Args:
        path: the trace.
        model: the model it was recorded with.
        tokenizer: likewise.

    Raises:
        TraceError: the file is no trace.
        OSError: it cannot be read.
    """
    lines = _read_lines(path)
    _, first = next(lines, (1, {}))
    if first.get("trace") != _VERSION or not isinstance(first.get("sizes"), dict):
        raise TraceError(
            f"{path}: wanted a trace of version {_VERSION}, got a file that does not begin like one"
        )
    run = _Run()
    with InferenceEngine(model, tokenizer, **first["sizes"], observer=run, start=False) as engine:
        handles: dict[int, TaskHandle] = {}
        num_steps, difference = 0, None
        for line, recorded in lines:
            arrivals = []
            for choices in _group_choices(recorded.get("arrived", ())):
                for given, handle in zip(choices, _submit(engine, choices), strict=True):
                    handles[given["arrival"]] = handle
                    arrivals.append(given["arrival"])
            for arrival in recorded.get("cancelled", ()):
                handles[arrival].cancel()
            engine.step()
            num_steps += 1
            difference = _compare(line, recorded, run.take(arrivals))
            if difference is not None:
                break
        return Replay(
            num_steps, difference, tuple(arrival for arrival in handles if arrival not in run.ended)
        )


class _Run(StepTrace):
    """Keeps the step at hand, in the names of the recording."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ended: set[int] = set()
        self._names: dict[int, int] = {}

    def take(self, arrivals: Sequence[int]) -> dict[str, list[Any]]:
        """The step that has just run; ``arrivals`` are the recorded numbers of what arrived in it."""
        step = self._step
        self._names.update(
            zip((given["arrival"] for given in step.get("arrived", ())), arrivals, strict=True)
        )
        name = self._names.__getitem__
        ended = [[name(arrival), reason] for arrival, reason in step.get("ended", ())]
        self.ended.update(arrival for arrival, _ in ended)
        return {
            "ran": [
                [[name(arrival), length] for arrival, length in forward] for forward in step.get("ran", ())
            ],
            "sampled": [[name(arrival), token_id] for arrival, token_id in step.get("sampled", ())],
            "preempted": [name(arrival) for arrival in step.get("preempted", ())],
            "ended": ended,
        }


_COMPARED = ("ran", "sampled", "preempted", "ended")


def _compare(
    line: int, recorded: Mapping[str, list[Any]], replayed: Mapping[str, list[Any]]
) -> Difference | None:
    for kind in _COMPARED:
        if recorded.get(kind, []) != replayed[kind]:
            return Difference(line, kind, recorded.get(kind, []), replayed[kind])
    return None


def _describe_task(task: Task) -> dict[str, Any]:
    params = {
        field.name: value
        for field in attrs.fields(SamplingParams)
        if (value := getattr(task.params, field.name)) != field.default
    }
    for name, value in params.items():
        if isinstance(value, Mapping):
            params[name] = [[token_id, bias] for token_id, bias in value.items()]
        elif isinstance(value, Grammar):
            params[name] = attrs.asdict(value)
    return {
        "arrival": task.arrival,
        "prompt_ids": task.tokens[: task.prompt_len],
        "params": params | {"seed": task.seed},
        "key": task.key,
        "salt": task.salt,
        "leader": task.leader.arrival if task.leader is not None else None,
        "backend": task.backend.value if task.backend is not None else None,
    }


def _group_choices(arrived: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Tasks of a step, each with its followers, who came with it and right after it."""
    groups: list[list[dict[str, Any]]] = []
    for given in arrived:
        # Traces from before there were choices name no leaders.
        if given.get("leader") is None:
            groups.append([given])
        else:
            groups[-1].append(given)
    return groups


def _submit(engine: InferenceEngine, choices: Sequence[Mapping[str, Any]]) -> list[TaskHandle]:
    """Submit a task and its followers, whose seeds count up from its own."""
    given = choices[0]
    params = dict(given["params"])
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    if "grammar" in params:
        params["grammar"] = Grammar(**params["grammar"])
    backend = given["backend"]
    with attn_backend(backend) if backend is not None else nullcontext():
        return engine.submit_many(
            [given["prompt_ids"]],
            SamplingParams(**params),
            n=len(choices),
            key=given["key"],
            salt=given["salt"],
        )


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
            except ValueError:
                raise TraceError(f"{path}:{number}: wanted a JSON object, got {line[:60]!r}") from None
            if not isinstance(entry, dict):
                raise TraceError(f"{path}:{number}: wanted a JSON object, got {line[:60]!r}")
            yield number, entry
