from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from astrai_bench.cases import Request, make_case
from astrai_bench.cli import bench

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "device.sh"

GRAPH_TEST = "test_on_a_gpu_captured_steps_answer_like_eager_ones_at_any_length"
FAKE_PYTHON = """#!/bin/bash
# Has a GPU; tests end as they are told to; the first bench gives a result, the others fail without one.
[[ "$1 $2" == "-c import xdist" ]] && exit "${NO_XDIST:-0}"
[[ "$1" == -c ]] && exit 0
echo "ran $*"
[[ "$2" == pytest ]] && { echo "$PYTEST_SAYS"; exit "${PYTEST_STATUS:-1}"; }
[[ "$3" == decode && "$*" == *"--batch 16"* ]] || exit 3
while [[ "$1" != --json ]]; do shift; done
echo '{"bench": "decode"}' > "$2"
"""


COLLECT = """
import importlib.abc, sys
import pytest

class Missing(importlib.abc.MetaPathFinder):
    names = set("aiohttp anthropic cattrs gguf huggingface_hub jinja2 matplotlib nox openai safetensors "
                "tokenizers transformers yaml".split())
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def run_script(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def list_steps() -> list[tuple[int, list[str]]]:
    done = run_script("--dry-run")
    assert done.returncode == 0, done.stderr
    steps = []
    for line in done.stdout.splitlines():
        limit, _, command = line.strip().partition(" s  ")
        steps.append((int(limit), shlex.split(command)))
    return steps


def test_the_script_is_valid_shell() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def list_tests() -> list[str]:
    (_, command), *_ = list_steps()
    assert any("pytest" in word for word in command)
    return [word for word in command if word.startswith("tests/")]


def test_it_runs_every_test_that_computes_on_a_gpu() -> None:
    paths = [ROOT / path for path in list_tests()]
    assert all(path.exists() for path in paths)
    device = re.compile(r"DEVICE = .*cuda.* if torch.cuda.is_available|skipif\(not torch.cuda.is_available")
    for file in (ROOT / "tests").rglob("test_*.py"):
        # The benches are checked where they are written; the script runs them as they are.
        if "bench" not in file.parts and device.search(file.read_text(encoding="utf-8")):
            assert any(file.is_relative_to(path) for path in paths), file
    assert ROOT / "tests/engine/test_graphs.py" in paths


def test_the_cuda_graph_test_that_must_pass_exists_by_its_name() -> None:
    assert f"graph_test={GRAPH_TEST}\n" in SCRIPT.read_text(encoding="utf-8")
    assert f"def {GRAPH_TEST}(" in (ROOT / "tests/engine/test_graphs.py").read_text(encoding="utf-8")


def test_its_tests_import_nothing_that_the_script_does_not_ask_for() -> None:
    """They are collected in a process where every other package of the environment is missing."""
    done = subprocess.run(
        # The kernels and the backend are the embeddable ring, whose imports are a contract of their own.
        [sys.executable, "-c", COLLECT, *(path for path in list_tests() if path.endswith(".py"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "server", "bench")),
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_what_it_may_take_stays_within_eight_minutes() -> None:
    budget = re.search(r"^readonly BUDGET_S=(\d+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert budget is not None
    # A step that is killed at the end of the budget has 10 s to say what it found.
    assert int(budget[1]) + 10 <= 8 * 60
    (tests_s, _), *benches = list_steps()
    # The shapes that matter most must have their time even after tests that used up theirs.
    assert tests_s + sum(limit for limit, _ in benches[:4]) <= int(budget[1])


def test_every_bench_it_runs_has_arguments_that_make_a_case() -> None:
    benches = [command for _, command in list_steps() if "astrai_bench" in command]
    assert {command[command.index("astrai_bench") + 1] for command in benches} == {
        "decode",
        "prefill",
        "paged-decode",
        "paged-prefill",
        "rotary",
    }
    for command in benches:
        name, *args = command[command.index("astrai_bench") + 1 :]
        with click.Context(bench) as parent:
            found = bench.get_command(parent, name)
            assert found is not None
            options = found.make_context(name, args, parent=parent).params
        case, _ = make_case(
            Request(
                op=name, batch=options["batch"], q_lens=options.get("q_len"), kv_lens=options.get("kv_len")
            ),  # type: ignore[arg-type]
            is_gpu=True,
        )
        assert case.batch == options["batch"]


@pytest.mark.parametrize("args", [("--fast",), ("results",)])
def test_unknown_arguments_are_refused(args: tuple[str, ...]) -> None:
    done = run_script(*args)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done = run_script(OUT=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "wanted a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def run_with_fake(tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON, encoding="utf-8")
    fake.chmod(0o755)
    return run_script(OUT=str(tmp_path / "out"), PYTHON=str(fake), **environment), tmp_path / "out"


def test_failures_are_counted_and_results_are_kept(tmp_path: Path) -> None:
    done, out = run_with_fake(tmp_path)
    assert done.returncode == 1
    assert [json.loads(line) for line in (out / "benches.jsonl").read_text().splitlines()] == [
        {"bench": "decode"}
    ]
    tests, graphs, first, *others = (out / "summary.txt").read_text().splitlines()
    assert tests.startswith("status 1, ")
    assert "pytest" in tests
    assert graphs == f"did not pass, and a GPU is there: {GRAPH_TEST}"
    assert first.startswith("status 0, ")
    assert len(others) == len(list_steps()) - 2
    assert all(line.startswith("status 3, ") for line in others)
    assert f"{2 + len(others)} failed" in done.stdout
    assert "ran -m pytest" in (out / "tests.txt").read_text()


@pytest.mark.parametrize(
    ("says", "num_failed"),
    [
        ("tests/engine/test_graphs.py::{} PASSED [ 1%]", 0),
        ("[gw3] [  1%] PASSED tests/engine/test_graphs.py::{} ", 0),
        ("tests/engine/test_graphs.py::{} SKIPPED (CUDA graphs need a CUDA device)", 1),
        ("tests/engine/test_graphs.py::{} FAILED", 1),
    ],
)
def test_a_skipped_cuda_graph_test_is_a_failure(tmp_path: Path, says: str, num_failed: int) -> None:
    _, out = run_with_fake(tmp_path, PYTEST_SAYS=says.format(GRAPH_TEST), PYTEST_STATUS="0")
    summary = (out / "summary.txt").read_text()
    assert summary.startswith("status 0, ")
    assert summary.count("did not pass") == num_failed


def test_without_xdist_every_file_has_a_process_of_its_own(tmp_path: Path) -> None:
    _, out = run_with_fake(tmp_path, NO_XDIST="1", PYTEST_SAYS="", PYTEST_STATUS="0")
    started = [
        line for line in (out / "tests.txt").read_text().splitlines() if line.startswith("ran -m pytest")
    ]
    files = [line.rpartition(" ")[2] for line in started]
    assert sorted(files) == sorted(
        str(file.relative_to(ROOT))
        for path in list_tests()
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    )
    assert all("--timeout 200" in line for line in started)
