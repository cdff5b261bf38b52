"""From a peer's description to its numbers: environment, weights, process, server. Standard library only.

A peer's script runs twice. Outside, in the environment of astrai-triton, it makes the peer's environment and
starts itself there; inside it loads the engine, or becomes the server. The last line outside is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environment import Environment, SetupError, Step, make_environment
from serving import ServerError, end_session, load_server
from workloads import Engine, Sizes, measure

TIMEOUT_S = 3600
_MARK = "peer result: "


@dataclass(frozen=True)
class Setup:
    """What a peer's engine or server is started with."""

    variant: str
    files: Mapping[str, str]
    """``hf`` (directory), ``bf16``, ``q8_0`` and ``source`` (GGUF files), and ``cache`` (a directory)."""
    sizes: Sizes
    threads: int


@dataclass(frozen=True)
class Peer:
    """One thing to measure."""

    name: str
    variants: tuple[str, ...]
    start: Callable[[Setup], Engine]
    """Runs inside."""
    packages: tuple[str, ...]
    """Whose versions are told."""
    requirements: tuple[str, ...] = ()
    """For pip, pinned."""
    step: Step | None = None
    """What is built besides."""
    prepare: Callable[[Setup], None] | None = None
    """Inside, before anything is timed: what a first start converts or compiles, and keeps."""
    serve: Callable[[Setup, int], list[str]] | None = None
    """Inside: the command of a server on that port of 127.0.0.1."""
    no_server: str = "the package has no server"
    variables: Callable[[Path, Setup], Mapping[str, str | None]] = field(default=lambda home, setup: {})
    """Outside: further environment variables of a variant's processes; None takes one away."""
    is_own: bool = False
    """Runs where astrai-triton does, without an environment."""


def main(peer: Peer) -> None:
    """The command line of a peer's script."""
    parser = argparse.ArgumentParser(description=f"Measure {peer.name}; the last line is JSON.")
    parser.add_argument(
        "--home", type=Path, default=Path(".nox/peers"), help="where environments and weights are"
    )
    parser.add_argument("--variant", action="append", choices=peer.variants, help="default: all")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name, size in Sizes().__dict__.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--no-http", action="store_true", help="leave the server out")
    parser.add_argument("--prepare", action="store_true", help="only make environment and weights")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=["prepare", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--spawned", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        fields = json.loads(arguments.inside)
        _run_inside(peer, Setup(**{**fields, "sizes": Sizes(**fields["sizes"])}), arguments)
        return
    result = _run_outside(peer, arguments)
    sys.stdout.write(json.dumps(result, separators=(",", ":")) + "\n")
    sys.exit("reason" in result)


def _run_outside(peer: Peer, arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(**{name: getattr(arguments, name) for name in Sizes().__dict__})
    home = arguments.home.resolve()
    try:
        environment = None
        if not peer.is_own:
            environment = make_environment(home, peer.name, peer.requirements, peer.step)
        weights = _prepare_weights(home)
    except SetupError as error:
        return {"peer": peer.name, "reason": str(error), "variants": {}}
    if arguments.prepare:
        return {"peer": peer.name, "variants": {}}
    found: dict[str, Any] = {}
    for variant in arguments.variant or peer.variants:
        cache = home / "cache" / peer.name
        setup = Setup(variant, weights["files"] | {"cache": str(cache)}, sizes, arguments.threads)
        try:
            run = _Run(peer, setup, home, environment)
            found[variant] = run.measure(weights["check_ids"])
        except SetupError as error:
            found[variant] = {"reason": str(error)}
            continue
        found[variant]["http"] = {"reason": "left out"} if arguments.no_http else run.measure_server()
    return {"peer": peer.name, "threads": arguments.threads, "variants": found}


def _prepare_weights(home: Path) -> dict[str, Any]:
    ready = home / "weights" / "ready.json"
    if not ready.exists():
        home.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("weights.py")
        Environment(Path(sys.prefix), home / "weights.log").run(sys.executable, script, "--home", home)
    return dict(json.loads(ready.read_text(encoding="utf-8")))


class _Run:
    """One variant, outside."""

    def __init__(self, peer: Peer, setup: Setup, home: Path, environment: Environment | None) -> None:
        self._peer = peer
        self._setup = setup
        self._python = sys.executable if environment is None else str(environment.python)
        variables: dict[str, str | None] = {
            **os.environ,
            "OMP_NUM_THREADS": str(setup.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **peer.variables(home, setup),
        }
        if environment is not None:
            # A peer must not find this project's packages.
            variables["PYTHONPATH"] = None
        self._env = {key: value for key, value in variables.items() if value is not None}
        self._log = home / f"{peer.name}-{setup.variant}.log"

    def measure(self, check_ids: list[int]) -> dict[str, Any]:
        """Run the workloads in a process of their own.

        Raises:
            SetupError: it failed.
        """
        if self._peer.prepare is not None:
            self._run_inside("prepare", check_ids)
        return self._run_inside("measure", check_ids)

    def _run_inside(self, task: str, check_ids: list[int]) -> dict[str, Any]:
        with self._log.open("w+", encoding="utf-8", errors="replace") as log:
            command = [*self._command(), "--task", task, "--spawned", repr(time.monotonic())]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
                env=self._env, start_new_session=True,
            )  # fmt: skip
            try:
                process.communicate(json.dumps(check_ids), timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise SetupError(f"took longer than {TIMEOUT_S} s (see {self._log})") from error
            finally:
                # Engines have processes of their own, which must not disturb the next.
                end_session(process)
            log.seek(0)
            lines = log.read().splitlines()
        for line in reversed(lines):
            if line.startswith(_MARK):
                result = dict(json.loads(line.removeprefix(_MARK)))
                if "reason" in result:
                    raise SetupError(result["reason"])
                return result
        raise SetupError(
            f"ended with status {process.returncode} and no result: {lines[-1:]} (see {self._log})"
        )

    def measure_server(self) -> dict[str, Any]:
        """Start the peer's server and let clients ask it."""
        if self._peer.serve is None:
            return {"reason": self._peer.no_server}
        log = self._log.with_suffix(".server.log")
        try:
            return load_server(self._command(), self._env, log, self._setup.sizes)
        except ServerError as error:
            return {"reason": str(error)}

    def _command(self) -> list[str]:
        setup = json.dumps({**self._setup.__dict__, "sizes": self._setup.sizes.__dict__})
        return [self._python, str(Path(sys.argv[0]).resolve()), "--inside", setup]


def _run_inside(peer: Peer, setup: Setup, arguments: argparse.Namespace) -> None:
    if arguments.port is not None:
        assert peer.serve is not None
        command = peer.serve(setup, arguments.port)
        # The server keeps this process's number, so that who started it can end it.
        os.execvp(command[0], command)
    try:
        result = (
            _prepare(peer, setup) if arguments.task == "prepare" else _measure(peer, setup, arguments.spawned)
        )
    except Exception as error:  # noqa: BLE001 - of a foreign engine; its row says what it said
        traceback.print_exc()
        result = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()
    # Engines with threads or processes of their own may hang at the end of the interpreter.
    os._exit(0)


def _prepare(peer: Peer, setup: Setup) -> dict[str, Any]:
    assert peer.prepare is not None
    with _scratch():
        peer.prepare(setup)
    return {}


def _measure(peer: Peer, setup: Setup, spawned_s: float) -> dict[str, Any]:
    check_ids = json.loads(sys.stdin.read())
    with _scratch():
        engine = peer.start(setup)
        engine.generate([check_ids], 1)
        start_s = time.monotonic() - spawned_s
        times = measure(engine, setup.sizes, check_ids)
    return {"start_s": start_s, **times, "versions": _find_versions(peer)}


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Some engines leave files where they run."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        yield
        os.chdir("/")


def _find_versions(peer: Peer) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": sys.version.split()[0]}
    for package in peer.packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
