"""A peer's server under load: start it, wait, let ``astrai bench serve`` ask it. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads import Sizes

START_TIMEOUT_S, LOAD_TIMEOUT_S, STOP_TIMEOUT_S = 900, 3600, 20


class ServerError(Exception):
    """A server did not start, or was not answered as it should; the text is what its row will say."""


def load_server(command: Sequence[str], env: Mapping[str, str], log: Path, sizes: Sizes) -> dict[str, Any]:
    """Start a server, load it with ``sizes.clients`` clients, end it.

    Args:
        command: starts it when ``--port N`` is appended.
        env: its environment.
        log: where its output goes.
        sizes: each client asks twice.

    Returns:
        What ``astrai bench serve`` found, and seconds from the start of the process: ``start_s`` to health,
        ``first_token_s`` to the answer to a first request.

    Raises:
        ServerError: it did not become healthy, or the load failed.
    """
    port = _find_free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch, log.open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=env, cwd=scratch, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_healthy(process, url, log)
            start_s = time.monotonic() - started
            _ask_for_one_token(url)
            first_token_s = time.monotonic() - started
            return {"start_s": start_s, "first_token_s": first_token_s, **_load(url, sizes)}
        finally:
            end_session(process)


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode} (see {log})")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise ServerError(f"the server was not healthy after {START_TIMEOUT_S} s (see {log})")


def _ask_for_one_token(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=START_TIMEOUT_S) as response:
            model = json.load(response)["data"][0]["id"]
        question = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as response:
            json.load(response)["choices"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"the first request failed: {type(error).__name__}: {error}") from error


def _load(url: str, sizes: Sizes) -> dict[str, Any]:
    options = {
        "protocol": "completions",
        "clients": sizes.clients,
        "num-requests": 2 * sizes.clients,
        "warmup": sizes.clients,
        "input-tokens": sizes.prompt,
        "max-tokens": sizes.answer,
        "seed": 0,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "astrai_bench", "serve", url, "--ignore-eos", *flags]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"the load took longer than {LOAD_TIMEOUT_S} s") from error
    last = run.stdout.strip().rpartition("\n")[2]
    if not last.startswith("{"):
        raise ServerError(f"the load failed: {' '.join(run.stderr.split())[-300:]}")
    document = dict(json.loads(last))
    # Some servers call a model by its path, which is nobody's business.
    document["load"]["model"] = Path(document["load"]["model"]).name
    requests = document["requests"]
    if requests["failed"]:
        raise ServerError(
            f"{requests['failed']} requests failed: {requests['errors']}; {requests['example']}"
        )
    if requests["shorter_than_max_tokens"]:
        raise ServerError(f"{requests['shorter_than_max_tokens']} answers ended before {sizes.answer} tokens")
    return document


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a session, and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        # The last signal is for those that the leader has left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    process.wait()
