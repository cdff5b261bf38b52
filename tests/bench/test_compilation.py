"""How variants are shared out among compiling processes, with processes that compile nothing."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier
from typing import IO, Any

import attrs
import pytest

from astrai_bench import compilation
from astrai_bench.compilation import collect_reports
from astrai_bench.errors import BenchError
from astrai_bench.static import KernelReport

NAMES = {80: ["a", "b"], 86: ["a"], 90: ["a", "b", "c", "d"]}


class FakeWorker:
    """Answers like a compiling process; notes which architecture each was asked for."""

    started: list[FakeWorker]
    refused = ""
    meeting: Barrier | None = None
    """Where every process waits for the others before its first kernel."""

    def __init__(self, families: Sequence[str], errors: IO[bytes]) -> None:
        self.examined: list[tuple[int, str]] = []
        self.is_open = True
        self.started.append(self)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.is_open
        capability = request["capability"]
        if "list" in request:
            return {"names": NAMES[capability]}
        name = request["examine"]
        if self.meeting is not None and not self.examined:
            self.meeting.wait(timeout=30)
        if name == self.refused:
            raise BenchError("the compiling process ended")
        self.examined.append((capability, name))
        return attrs.asdict(KernelReport(name, f"sm_{capability}", "3.9.0"))

    def close(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    workers: list[FakeWorker] = []
    monkeypatch.setattr(FakeWorker, "started", workers, raising=False)
    monkeypatch.setattr(compilation, "Worker", FakeWorker)
    return workers


@pytest.mark.parametrize("num_workers", [1, 2, 3, 12])
def test_a_process_compiles_for_one_architecture_and_every_variant_once(
    started: list[FakeWorker], num_workers: int
) -> None:
    collect_reports(capabilities=[80, 86, 90], num_workers=num_workers)
    examined = [job for worker in started for job in worker.examined]
    assert sorted(examined) == [(capability, name) for capability in NAMES for name in NAMES[capability]]
    assert all(len({capability for capability, _ in worker.examined}) <= 1 for worker in started)
    assert not any(worker.is_open for worker in started)


def test_one_process_at_a_time_needs_as_many_as_there_are_architectures(started: list[FakeWorker]) -> None:
    collect_reports(capabilities=[80, 86, 90], num_workers=1)
    assert [worker.examined[0][0] for worker in started] == [90, 80, 86]


def test_a_single_architecture_is_shared_out(
    started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "meeting", Barrier(2))
    collect_reports(capabilities=[90], num_workers=2)
    assert all(worker.examined for worker in started)
    assert len(started) == 2


def test_reports_come_in_the_order_of_the_lists_and_progress_counts_them() -> None:
    seen: list[tuple[int, int]] = []
    reports = collect_reports(
        ["a", "[cd]"], [90, 80], num_workers=2, on_progress=lambda done, total: seen.append((done, total))
    )
    assert [(report.arch, report.variant) for report in reports] == [
        ("sm_90", "a"),
        ("sm_90", "c"),
        ("sm_90", "d"),
        ("sm_80", "a"),
    ]
    assert seen == [(done, 4) for done in range(5)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_process_that_dies_ends_the_collection_and_the_other_processes(
    started: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(FakeWorker, "refused", "a")
    with pytest.raises(BenchError, match="the compiling process ended"):
        collect_reports(capabilities=[80, 86, 90], num_workers=num_workers)
    assert not any(worker.is_open for worker in started)
