"""The server from start to exit, with real signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from astrai_server.run import run_server
from fake_engine import FakeEngine, build_settings, chat_body


def request(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Visitor:
    """Runs ``visit(url)`` in a thread once the server listens, then sends SIGTERM as often as it takes."""

    def __init__(self, visit: Callable[[str], None]) -> None:
        self._visit = visit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_over = threading.Event()

    def come(self, urls: list[str]) -> None:
        self._thread = threading.Thread(target=self._run, args=(urls[0],), daemon=True)
        self._thread.start()

    def _run(self, url: str) -> None:
        try:
            self._visit(url)
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            self._error = error
            # Without this, the server would run for ever.
            terminate()
            terminate()

    def leave(self) -> None:
        assert self._thread is not None
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def run(engine: Any, visit: Callable[[str], None], **options: Any) -> int:
    """Serve ``engine`` (or what a function returns) while ``visit`` runs; the exit status."""
    visitor = Visitor(visit)
    load = engine if callable(engine) else lambda: engine
    status = run_server(build_settings(**options), load, on_listening=visitor.come)
    visitor.leave()
    return status


def test_the_socket_answers_while_the_engine_loads() -> None:
    may_load = threading.Event()
    ready: list[Any] = []
    engine = FakeEngine()

    def load() -> Any:
        assert may_load.wait(10)
        return engine

    def visit(url: str) -> None:
        status, body = request(url, "GET", "/health")
        assert (status, json.loads(body)["status"]) == (503, "loading")
        may_load.set()
        wait_until(lambda: request(url, "GET", "/health")[0] == 200)
        assert request(url, "POST", "/v1/messages", chat_body())[0] == 200
        terminate()

    visitor = Visitor(visit)
    assert run_server(build_settings(), load, on_listening=visitor.come, on_ready=ready.append) == 0
    visitor.leave()
    assert ready == [engine]
    assert not engine.is_alive


def test_a_signal_lets_live_streams_finish_and_refuses_new_ones() -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True
    bodies: list[bytes] = []

    def visit(url: str) -> None:
        wait_until(lambda: request(url, "GET", "/health")[0] == 200)

        def stream() -> None:
            bodies.append(request(url, "POST", "/v1/chat/completions", chat_body(stream=True))[1])

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.prompts) == 4)
        terminate()
        wait_until(lambda: request(url, "GET", "/health")[0] == 503)
        assert request(url, "POST", "/v1/messages", chat_body())[0] == 503
        engine.is_held = False
        for thread in threads:
            thread.join(10)

    assert run(engine, visit) == 0
    assert len(bodies) == 4
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_streams_that_outlast_the_drain_end_with_an_error(num_signals: int) -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True
    bodies: list[bytes] = []

    def visit(url: str) -> None:
        wait_until(lambda: request(url, "GET", "/health")[0] == 200)
        thread = threading.Thread(
            target=lambda: bodies.append(request(url, "POST", "/v1/messages", chat_body(stream=True))[1])
        )
        thread.start()
        wait_until(lambda: len(engine.prompts) == 1)
        terminate()
        if num_signals == 2:
            wait_until(lambda: request(url, "GET", "/health")[0] == 503)
            terminate()
        thread.join(10)

    started = time.monotonic()
    assert run(engine, visit, drain_timeout_s=0.2 if num_signals == 1 else 30.0) == num_signals - 1
    assert time.monotonic() - started < 15
    assert b"event: error" in bodies[0]
    assert b"[DONE]" not in bodies[0]


def test_a_signal_while_loading_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Event()
    statuses: list[int] = []
    # Nobody can stop the thread that loads, so the process is left without further ado.
    monkeypatch.setattr(os, "_exit", statuses.append)

    def load() -> Any:
        loaded.wait(60)

    def visit(url: str) -> None:
        assert request(url, "GET", "/health")[0] == 503
        terminate()

    started = time.monotonic()
    run(load, visit)
    assert time.monotonic() - started < 15
    assert statuses == [0]
    loaded.set()


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_step_that_runs_is_waited_for_unless_a_second_signal_comes(
    is_forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    stepped = threading.Event()
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    def stop() -> None:
        assert stepped.wait(60)

    monkeypatch.setattr(engine, "shutdown", stop)
    monkeypatch.setattr("astrai_server.run.CLOSE_S", 0.05)

    def visit(url: str) -> None:
        wait_until(lambda: request(url, "GET", "/health")[0] == 200)
        terminate()
        wait_until(lambda: request(url, "GET", "/health")[0] == 503)
        if is_forced:
            terminate()
        else:
            # Longer than the last frames of a forced end would get.
            time.sleep(0.3)
            stepped.set()

    assert run(engine, visit) == is_forced
    assert statuses == [1] * is_forced
    stepped.set()


def test_an_engine_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    def load() -> Any:
        raise FileNotFoundError("no such model")

    with pytest.raises(FileNotFoundError, match="no such model"):
        run_server(build_settings(), load)


def test_an_address_in_use_is_an_error_before_anything_is_loaded() -> None:
    loaded: list[None] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = build_settings(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            run_server(settings, lambda: loaded.append(None))  # type: ignore[arg-type, return-value]
    assert not loaded


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    urls: list[str] = []

    def visit(url: str) -> None:
        urls.append(url)
        terminate()

    try:
        run(FakeEngine(), visit, host="::1")
    except OSError:
        pytest.skip("needs an IPv6 loopback address")
    assert urls[0].startswith("http://[::1]:")
