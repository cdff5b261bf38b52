"""Run the scenarios of one client, and say on standard output how each went, one JSON object a line.

The runner names the scenarios as arguments, the server in ``CLIENTS_URL`` and ``CLIENTS_KEY``, and the
package whose version is wanted in ``CLIENTS_PACKAGE``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

URL = os.environ.get("CLIENTS_URL", "")
KEY = os.environ.get("CLIENTS_KEY", "")
MODEL = "scripted"
TIMEOUT_S = 20
IDLE_TIMEOUT_S = 10
CASES: dict[str, Any] = json.loads((Path(__file__).parent / "cases.json").read_text())

_E = TypeVar("_E", bound=BaseException)


class WrongAnswerError(Exception):
    """A client gave something else than it should."""


def run(*scenarios: Callable[[], None]) -> None:
    """Run those of ``scenarios`` that the command line names."""
    # Clients may print; what they print is not for the runner.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    name_to_scenario = {scenario.__name__: scenario for scenario in scenarios}
    say(version=importlib.metadata.version(os.environ["CLIENTS_PACKAGE"]))
    for name in sys.argv[1:]:
        say(begin=name)
        started = time.monotonic()
        error = None
        try:
            name_to_scenario[name]()
        except Exception as caught:  # noqa: BLE001 - it is reported
            error = describe(caught)
            traceback.print_exception(caught)
        say(end=name, error=error, seconds=round(time.monotonic() - started, 2))
    channel.close()
    # Threads and event loops of clients that were left in mid-stream may not end.
    sys.stderr.flush()
    os._exit(0)


def describe(error: Exception) -> str:
    """The error, and the line of the scenario where it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
    own = [frame for frame in own if frame.filename != __file__] or own
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""
    what = str(error) if isinstance(error, WrongAnswerError) else f"{type(error).__name__}: {error}"
    return where + what


def expect(what: str, got: Any, wanted: Any) -> None:
    """Raise ``WrongAnswerError`` unless both are equal."""
    if got != wanted:
        raise WrongAnswerError(f"{what}: wanted {wanted!r}, got {got!r}")


def expect_that(what: str, holds: Any, got: Any = None) -> None:
    """Raise ``WrongAnswerError`` unless ``holds``."""
    if not holds:
        raise WrongAnswerError(f"wanted {what}" + ("" if got is None else f", got {got!r}"))


def expect_error(kind: type[_E], call: Callable[[], Any]) -> _E:
    """The error of ``kind`` that ``call`` raises."""
    try:
        got = call()
    except kind as error:
        return error
    raise WrongAnswerError(f"wanted {kind.__name__}, got {got!r}")


def expect_calls(got: list[tuple[str, Any]], wanted: Any) -> None:
    """Names and arguments of tool calls."""
    expect("tool calls", [[name, arguments] for name, arguments in got], wanted)


def expect_idle() -> None:
    """The server's ``/stats`` show that nothing runs any more."""
    request = urllib.request.Request(f"{URL}/stats", headers={"Authorization": f"Bearer {KEY}"})
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            stats = json.load(response)
        busy = {key: stats[key] for key in ("active_tasks", "waiting_queue", "pages_used") if stats[key]}
        if not busy:
            return
        expect_that("an idle server after the client left", time.monotonic() < deadline, busy)
        time.sleep(0.01)


def expect_retries(call: Callable[[str], str]) -> None:
    """``call`` is refused twice, waits as long as it was told each time, and then gets its answer."""
    case = CASES["retries"]
    started = time.monotonic()
    expect("text", call(case["ask"] + uuid.uuid4().hex), case["answer"])
    seconds = time.monotonic() - started
    expect_that(f"at least {case['wait_s']} s of waiting", seconds >= case["wait_s"], round(seconds, 2))


def read_into(pieces: list[Any], stream: Iterable[Any]) -> None:
    """Read ``stream`` to its end, or to its error."""
    for piece in stream:
        pieces.append(piece)  # noqa: PERF402 - not extend: what came before an error counts


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def schema_of(name: str) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return dict(CASES["tools"]["schemas"][name])
