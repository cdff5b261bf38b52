from __future__ import annotations

import json
import os
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

FAKE_PYTHON = """#!/bin/bash
# Has a GPU; a test fails; the first bench gives a result, the others fail without one.
[[ "$1" == -c ]] && exit 0
echo "ran $*"
[[ "$2" == pytest ]] && exit 1
[[ "$3" == decode && "$*" == *"--batch 16"* ]] || exit 3
while [[ "$1" != --json ]]; do shift; done
echo '{"bench": "decode"}' > "$2"
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


def test_the_tests_it_runs_exist() -> None:
    (_, command), *_ = list_steps()
    assert "pytest" in command
    paths = [word for word in command if word.startswith("tests/")]
    assert "tests/ops" in paths
    assert "tests/backend" in paths
    assert all((ROOT / path).exists() for path in paths)


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


def test_failures_are_counted_and_results_are_kept(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON, encoding="utf-8")
    fake.chmod(0o755)
    done = run_script(OUT=str(tmp_path / "out"), PYTHON=str(fake))
    assert done.returncode == 1
    out = tmp_path / "out"
    assert [json.loads(line) for line in (out / "benches.jsonl").read_text().splitlines()] == [
        {"bench": "decode"}
    ]
    summary = (out / "summary.txt").read_text().splitlines()
    assert len(summary) == len(list_steps())
    assert summary[0].startswith("status 1, ")
    assert "pytest" in summary[0]
    assert summary[1].startswith("status 0, ")
    assert all(line.startswith("status 3, ") for line in summary[2:])
    assert f"{len(summary) - 1} failed" in done.stdout
    assert "ran -m pytest" in (out / "tests.txt").read_text()
