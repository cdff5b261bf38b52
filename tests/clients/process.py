"""The processes of a run: one server, and one of each client."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clients.environment import ROOT
from clients.grid import Outcome

KEY = "clients-0123456789abcdef"
"""The server's API key."""
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
SCENARIO_TIMEOUT_S = 30
_LOG_CHARS = 600

ENDED = object()
"""What is read at the end of a process's output."""


class ServerError(Exception):
    """The server did not start, or did not end as it should."""


@contextlib.contextmanager
def run_server(log: Path) -> Iterator[str]:
    """A server for the length of the context; yields its URL.

    Raises:
        ServerError: it does not start, or its end after SIGTERM is not clean.
    """
    paths = [str(ROOT / "tests"), str(ROOT), str(ROOT / "server"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "ASTRAI_API_KEYS": KEY,
    }
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "clients.server"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=env,
        )
    try:
        yield _read_url(process, log)
        process.terminate()
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server did not end within {STOP_TIMEOUT_S} s: {read_end(log)}") from None
        if status:
            raise ServerError(f"the server ended with status {status}: {read_end(log)}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _read_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    try:
        line = read_lines(process.stdout).get(timeout=START_TIMEOUT_S)
    except queue.Empty:
        raise ServerError(f"the server did not start within {START_TIMEOUT_S} s: {read_end(log)}") from None
    if line is ENDED:
        raise ServerError(f"the server did not start: {read_end(log)}")
    return str(json.loads(line)["url"])


def try_client(
    command: Sequence[str],
    scenarios: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
    scenario_timeout_s: float = SCENARIO_TIMEOUT_S,
) -> tuple[str, dict[str, Outcome]]:
    """Run scenarios, in a process that is started again when it hangs or dies.

    Args:
        command: what runs the scenarios whose names follow.
        env: added to the environment.
        log: file for its standard error.

    Returns:
        Version of the client, and how each scenario went.
    """
    version, outcomes = "?", {}
    with log.open("w"):
        pass
    left = list(scenarios)
    while left:
        found, ended = _run_once(
            [*command, *left], left, os.environ | env, log, start_timeout_s, scenario_timeout_s
        )
        version = found or version
        outcomes |= ended
        if not ended:
            lost = Outcome.fail(f"the client did not start: {read_end(log)}")
            return version, outcomes | dict.fromkeys(left, lost)
        left = [name for name in left if name not in outcomes]
    return version, outcomes


def _run_once(
    command: Sequence[str],
    scenarios: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    start_timeout_s: float,
    scenario_timeout_s: float,
) -> tuple[str | None, dict[str, Outcome]]:
    """Version and outcomes until the first scenario that hangs or kills its process, that one included."""
    version, outcomes = None, {}
    running: str | None = None
    with log.open("a") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    assert process.stdout is not None
    lines = read_lines(process.stdout)
    try:
        while True:
            line = lines.get(timeout=start_timeout_s if version is None else scenario_timeout_s)
            if line is ENDED:
                if running is not None:
                    outcomes[running] = Outcome.fail(f"the client died: {read_end(log)}")
                elif version is not None:
                    silent = (name for name in scenarios if name not in outcomes)
                    outcomes |= dict.fromkeys(silent, Outcome.fail("the client ended without a word of it"))
                break
            event = json.loads(line)
            if "version" in event:
                version = event["version"]
            elif "begin" in event:
                running = event["begin"]
            else:
                running = None
                outcomes[event["end"]] = Outcome.from_event(event)
    except queue.Empty:
        if running is not None:
            outcomes[running] = Outcome.fail(f"no end within {scenario_timeout_s:g} s")
    finally:
        process.kill()
        process.wait()
    return version, outcomes


def read_lines(stream: IO[str]) -> queue.SimpleQueue[Any]:
    """Lines as they come, then ``ENDED``."""
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(ENDED)
        stream.close()

    threading.Thread(target=read, daemon=True).start()
    return lines


def read_end(log: Path) -> str:
    """The last that a process said."""
    return log.read_text(errors="replace")[-_LOG_CHARS:].strip()
