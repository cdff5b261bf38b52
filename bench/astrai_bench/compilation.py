"""Examine many variants in parallel, in processes that compile even where this one interprets."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import IO, Any

import attrs

from astrai_bench.cases import Case
from astrai_bench.errors import BenchError
from astrai_bench.plan import PlannedLaunch
from astrai_bench.static import FAMILIES, KernelReport
from astrai_bench.static_rules import Fault

CAPABILITIES = (80, 86, 89, 90, 100, 120)
"""Architectures of the report, 90 for sm_90."""

Job = tuple[int, str]
"""Capability and name of a variant."""


class Worker:
    """One compiling process, for one architecture: see ``astrai_bench.worker``."""

    def __init__(self, families: Sequence[str], errors: IO[bytes]) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The worker finds what this process finds, whatever put it on the path.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # A file, as nobody reads a pipe until the end, and a compiler that refuses prints whole kernels.
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, "-m", "astrai_bench.worker", *families],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            BenchError: the worker refused, or it died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"the compiling process ended at {request}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _last_words(self) -> str:
        self._process.communicate()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"status {self._process.returncode}"


def collect_reports(
    variant_globs: Sequence[str] = ("*",),
    capabilities: Sequence[int] = CAPABILITIES,
    *,
    families: Sequence[str] = FAMILIES,
    num_workers: int = 2,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KernelReport]:
    """Compile and measure variants.

    Args:
        variant_globs: shell patterns of variant names, of which one has to match.
        capabilities: architectures, of ``CAPABILITIES``.
        families: modules with a ``list_variants(arch)``.
        num_workers: processes at work at once, each for one architecture after the other.
        on_progress: called in any thread with reports done and reports due.

    Returns:
        One report per variant and architecture, in the order of the lists.

    Raises:
        BenchError: no variant matches, or a worker dies.
    """
    with _start_worker(families) as lister:
        jobs = _list_jobs(lister, variant_globs, capabilities)
        if not jobs:
            given = " ".join(variant_globs)
            raise BenchError(f"variant: wanted a pattern that matches a variant, got {given!r}")
        board = _Board(jobs, on_progress)
        num_threads = min(num_workers, len(jobs))
        with ThreadPoolExecutor(num_threads) as threads:
            # The process that listed has compiled nothing yet: it is as good as a new one.
            firsts = [lister, *[None] * (num_threads - 1)]
            shares = [threads.submit(_do_share, board, families, first) for first in firsts]
    for share in shares:
        share.result()
    return [board.reports[job] for job in jobs]


def collect_launches(
    case: Case, capability: int, *, families: Sequence[str] = FAMILIES
) -> list[PlannedLaunch]:
    """The launches of one call, each with the report of its kernel.

    Args:
        case: the call.
        capability: one of ``CAPABILITIES``.
        families: modules with a ``list_variants(arch)``.

    Raises:
        BenchError: the call has no kernel, or the worker dies.
    """
    with _start_worker(families) as worker:
        answer = worker.ask({"plan": attrs.asdict(case), "capability": capability})
    return [
        PlannedLaunch(**{**launch, "grid": tuple(launch["grid"]), "report": read_report(launch["report"])})
        for launch in answer["launches"]
    ]


def read_report(answer: dict[str, Any]) -> KernelReport:
    """A report from its JSON form."""
    faults = tuple(Fault(**fault) for fault in answer["faults"])
    return KernelReport(**{**answer, "mma": tuple(answer["mma"]), "faults": faults})


@contextmanager
def _start_worker(families: Sequence[str]) -> Iterator[Worker]:
    with tempfile.TemporaryFile() as errors:
        worker = Worker(families, errors)
        try:
            yield worker
        finally:
            worker.close()


def _list_jobs(worker: Worker, variant_globs: Sequence[str], capabilities: Sequence[int]) -> list[Job]:
    return [
        (capability, name)
        for capability in capabilities
        for name in worker.ask({"list": None, "capability": capability})["names"]
        if any(fnmatch.fnmatchcase(name, glob) for glob in variant_globs)
    ]


class _Board:
    """What is still to compile and what came of the rest; for any number of threads."""

    def __init__(self, jobs: Sequence[Job], on_progress: Callable[[int, int], None]) -> None:
        self.reports: dict[Job, KernelReport] = {}
        self._pending: dict[int, list[str]] = {}
        for capability, name in reversed(jobs):
            self._pending.setdefault(capability, []).append(name)
        self._num_processes = dict.fromkeys(self._pending, 0)
        self._num_jobs = len(jobs)
        self._on_progress = on_progress
        self._lock = Lock()
        on_progress(0, len(jobs))

    def choose(self) -> int | None:
        """The architecture that a new process serves best: most to do for each process; None when done."""
        with self._lock:
            left = {capability: len(names) for capability, names in self._pending.items() if names}
            if not left:
                return None
            best = max(left, key=lambda capability: left[capability] / (1 + self._num_processes[capability]))
            self._num_processes[best] += 1
            return best

    def take(self, capability: int) -> str | None:
        """A variant that nobody else compiles for this architecture; None when there is none left."""
        with self._lock:
            return self._pending[capability].pop() if self._pending[capability] else None

    def enter(self, job: Job, report: KernelReport) -> None:
        """Keep a report."""
        with self._lock:
            self.reports[job] = report
            self._on_progress(len(self.reports), self._num_jobs)

    def clear(self) -> None:
        """Let nobody begin anything more."""
        with self._lock:
            for names in self._pending.values():
                names.clear()


def _do_share(board: _Board, families: Sequence[str], worker: Worker | None) -> None:
    """Compile until nothing is left, with a process for each architecture."""
    try:
        while (capability := board.choose()) is not None:
            with _start_worker(families) if worker is None else nullcontext(worker) as at_work:
                worker = None
                while (name := board.take(capability)) is not None:
                    answer = at_work.ask({"examine": name, "capability": capability})
                    board.enter((capability, name), read_report(answer))
    except BaseException:
        board.clear()
        raise
