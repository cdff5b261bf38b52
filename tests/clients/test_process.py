from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clients.process import ServerError, run_server, try_client

CLIENT = """
import json, os, sys, time

def say(**fields):
    print(json.dumps(fields), flush=True)

if "unable" in sys.argv:
    sys.exit("no such module")
say(version="1.2")
for name in sys.argv[1:]:
    say(begin=name)
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        sys.exit("out of memory")
    say(end=name, error="wrong" if name == "fails" else None, seconds=0.5)
"""


def try_scenarios(
    tmp_path: Path, *names: str, timeout_s: float = 20
) -> tuple[str, dict[str, tuple[str, str]]]:
    command = [sys.executable, "-c", CLIENT]
    version, outcomes = try_client(command, names, {}, tmp_path / "log", scenario_timeout_s=timeout_s)
    return version, {name: (outcome.result, outcome.reason or "") for name, outcome in outcomes.items()}


def test_each_scenario_is_reported(tmp_path: Path) -> None:
    assert try_scenarios(tmp_path, "works", "fails") == (
        "1.2",
        {"works": ("pass", ""), "fails": ("fail", "wrong")},
    )


def test_what_stands_behind_a_scenario_that_hangs_runs_all_the_same(tmp_path: Path) -> None:
    _, outcomes = try_scenarios(tmp_path, "first", "hangs", "last", timeout_s=1)
    assert outcomes == {
        "first": ("pass", ""),
        "hangs": ("fail", "no end within 1 s"),
        "last": ("pass", ""),
    }


def test_what_stands_behind_a_scenario_that_dies_runs_all_the_same(tmp_path: Path) -> None:
    _, outcomes = try_scenarios(tmp_path, "dies", "last")
    assert outcomes == {"dies": ("fail", "the client died: out of memory"), "last": ("pass", "")}


@pytest.mark.parametrize("names", [("unable", "works")])
def test_a_client_that_does_not_start_fails_everywhere(tmp_path: Path, names: tuple[str, ...]) -> None:
    version, outcomes = try_scenarios(tmp_path, *names)
    assert version == "?"
    assert outcomes == dict.fromkeys(names, ("fail", "the client did not start: no such module"))


def use_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str:
    """The URL of a server whose interpreter is ``script``."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with run_server(tmp_path / "server.log") as url:
        return url


def test_a_server_gives_its_url_and_ends_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "trap 'exit 0' TERM; echo '{\"url\": \"http://here\"}'; while :; do sleep 0.05; done"
    assert use_server(tmp_path, monkeypatch, script) == "http://here"


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="did not start: no port"):
        use_server(tmp_path, monkeypatch, "echo no port >&2; exit 1")


def test_a_server_that_ends_badly_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "trap 'echo lost >&2; exit 3' TERM; echo '{\"url\": \"x\"}'; while :; do sleep 0.05; done"
    with pytest.raises(ServerError, match="ended with status 3: lost"):
        use_server(tmp_path, monkeypatch, script)
