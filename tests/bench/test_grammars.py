from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from astrai_bench.cli import bench
from astrai_bench.grammar_cases import CASES, SchemaCase
from astrai_bench.grammar_documents import DOCUMENTS
from astrai_bench.grammar_engines import RefusedError, build_engines
from astrai_bench.grammar_hostile import HOSTILE
from astrai_bench.grammars import ByteVocabulary, judge_case, time_masks, try_hostile

VOCABULARY = ByteVocabulary()


@pytest.fixture(scope="module")
def compile_schema() -> Callable[[Any], Any]:
    return build_engines(VOCABULARY)["astrai"]()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_schema_is_right_or_refused(compile_schema: Callable[[Any], Any], case: SchemaCase) -> None:
    coverage = judge_case(compile_schema, VOCABULARY.encode, case)
    assert coverage.verdict in ("right", "refused"), coverage


def test_there_are_schemas_enough() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


class Scripted:
    """Accepts the texts that it was given and nothing else."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.text = ""

    def __call__(self, schema: Any) -> Callable[[], Scripted]:
        if schema == "refuse":
            raise RefusedError("because")
        return lambda: Scripted(*self.texts)

    def fill(self) -> None:
        pass

    def accept(self, token_id: int) -> bool:
        self.text += chr(token_id)
        return any(text.startswith(self.text) for text in self.texts)

    def may_end(self) -> bool:
        return self.text in self.texts


@pytest.mark.parametrize(
    ("texts", "case", "verdict", "detail"),
    [
        (("1", "2"), SchemaCase("", {}, (1, 2), (3,)), "right", ""),
        (("1",), SchemaCase("", {}, (1, 2), (3,)), "too strict", "2"),
        (("1", "2", "3"), SchemaCase("", {}, (1, 2), (3,)), "too lax", "3"),
        (("1", "22"), SchemaCase("", {}, (1,), (2,)), "right", ""),
        (("1", "[ ]"), SchemaCase("", {}, (1,), (), ("[ ]",)), "too lax", "[ ]"),
        (("1",), SchemaCase("", {}, (), (3,)), "too lax", "taken, though there is nothing to write"),
        (("1",), SchemaCase("", "refuse", (1,), (3,)), "refused", "because"),
    ],
)
def test_a_verdict_names_the_first_value_that_was_judged_wrongly(
    texts: tuple[str, ...], case: SchemaCase, verdict: str, detail: str
) -> None:
    coverage = judge_case(Scripted(*texts), VOCABULARY.encode, case)
    assert (coverage.verdict, coverage.detail) == (verdict, detail)


def test_every_token_of_every_document_is_timed(compile_schema: Callable[[Any], Any]) -> None:
    times = time_masks(compile_schema, VOCABULARY.encode, rounds=2)
    texts = [
        json.dumps(value, ensure_ascii=False, indent=indent)
        for *_, value in DOCUMENTS
        for indent in (None, 2)
    ]
    assert times.num_tokens == sum(len(text.encode()) for text in texts)
    assert 0 < times.warm_p50_us <= times.warm_p99_us <= times.warm_max_us
    assert 0 < times.cold_p50_us <= times.cold_p99_us


def test_hostile_schemas_never_take_our_process(compile_schema: Callable[[Any], Any]) -> None:
    for name, schema in HOSTILE:
        result = try_hostile(lambda: compile_schema, name, schema)
        assert result.outcome in ("taken", "refused"), result
        assert result.peak_mib > 0


def test_a_process_that_dies_or_hangs_is_reported() -> None:
    def die(_: Any) -> Any:
        os._exit(3)

    def hang(_: Any) -> Any:
        time.sleep(60)

    assert try_hostile(lambda: die, "x", {}).outcome == "the process died (3)"
    assert try_hostile(lambda: hang, "x", {}, limit_s=0.2).outcome == "killed after 0 s"


def test_the_last_line_is_json_and_goes_to_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "grammar.json"
    result = CliRunner().invoke(bench, ["grammar", "--bytes", "--no-hostile", "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])
    assert document == json.loads(path.read_text())
    assert {"astrai", "llguidance"} <= document["engines"].keys()
    assert len(document["engines"]["astrai"]["cases"]) == len(CASES)
    assert "too lax" in result.output


def test_an_unknown_model_is_one_line() -> None:
    result = CliRunner().invoke(bench, ["grammar", "--model", "no-such-model"])
    assert result.exit_code == 1
    assert "no-such-model" in result.output
