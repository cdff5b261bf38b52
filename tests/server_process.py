"""A real ``astrai serve`` process, for tests from the outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text())
START_TIMEOUT_S = 240


@attrs.define
class Server:
    """A running ``astrai serve``."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return dict(json.load(response))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60) -> tuple[int, dict[str, Any]]:
        """Status and JSON body, for errors too."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until_idle(self, timeout_s: float = 10) -> dict[str, Any]:
        """``/stats`` once nothing runs or waits."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.get("/stats")
            if not stats["active_tasks"] and not stats["waiting_queue"] and not stats["pages_used"]:
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)


def find_free_port() -> int:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def start_server(log: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start ``astrai serve`` on a free port and wait until it is healthy; kill it in the end if need be."""
    port = find_free_port()
    command = [sys.executable, "-c", "from astrai_server.cli import main; main()"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "serve", "--port", str(port), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | (env or {}),
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(10)


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert server.process.poll() is None, server.log.read_text()
        try:
            if server.get("/health")["model_loaded"]:
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)
