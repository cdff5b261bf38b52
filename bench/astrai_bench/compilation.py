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
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import IO, Any

import attrs

from astrai_bench.cases import Case
from astrai_bench.errors import BenchError
from astrai_bench.plan import PlannedLaunch
from astrai_bench.static import FAMILIES, Fault, KernelReport

CAPABILITIES = (80, 86, 89, 90, 100, 120)
"""Architectures of the report, 90 for sm_90."""


class Worker:
    """One compiling process."""

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
        num_workers: processes at work at once.
        on_progress: called in any thread with reports done and reports due.

    Returns:
        One report per variant and architecture, in the order of the lists.

    Raises:
        BenchError: no variant matches, or a worker dies.
    """
    idle: SimpleQueue[Worker] = SimpleQueue()
    with ExitStack() as stack:
        idle.put(stack.enter_context(_start_worker(families)))
        jobs = list(_list_jobs(idle, variant_globs, capabilities))
        if not jobs:
            given = " ".join(variant_globs)
            raise BenchError(f"variant: wanted a pattern that matches a variant, got {given!r}")
        on_progress(0, len(jobs))
        for _ in range(min(num_workers, len(jobs)) - 1):
            idle.put(stack.enter_context(_start_worker(families)))
        reports = []
        with ThreadPoolExecutor(num_workers) as threads:
            for report in threads.map(lambda job: _examine(idle, *job), jobs):
                reports.append(report)
                on_progress(len(reports), len(jobs))
    return reports


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


def _list_jobs(
    idle: SimpleQueue[Worker], variant_globs: Sequence[str], capabilities: Sequence[int]
) -> Iterator[tuple[int, str]]:
    worker = idle.get()
    for capability in capabilities:
        for name in worker.ask({"list": None, "capability": capability})["names"]:
            if any(fnmatch.fnmatchcase(name, glob) for glob in variant_globs):
                yield capability, name
    idle.put(worker)


def _examine(idle: SimpleQueue[Worker], capability: int, name: str) -> KernelReport:
    worker = idle.get()
    try:
        return read_report(worker.ask({"examine": name, "capability": capability}))
    finally:
        idle.put(worker)
