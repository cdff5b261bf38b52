"""Run calls through every implementation and judge them, on one process or several."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Literal

import attrs
import torch

from astrai_bench.cross_cases import CrossCase
from astrai_bench.cross_compare import (
    Difference,
    differs_by_poison,
    exceeds,
    find_tolerance,
    list_violations,
    measure_difference,
)
from astrai_bench.cross_inputs import make_cross_inputs
from astrai_bench.cross_providers import (
    REFERENCE,
    CrossProvider,
    Outputs,
    choose_interpreter,
    compute_reference,
    list_cross_providers,
)

Status = Literal["ran", "skipped", "failed"]


@attrs.frozen(kw_only=True)
class Availability:
    """Whether an implementation takes part at all."""

    provider: str
    status: Literal["ready", "unavailable", "failed"]
    """"failed": it should have been able to, such as where its build broke."""
    reason: str = ""


@attrs.frozen(kw_only=True)
class Run:
    """One implementation of one call."""

    provider: str
    status: Status
    reason: str = ""
    """Why it was skipped, or what it raised."""
    violations: tuple[str, ...] = ()
    """What no tolerance covers."""


@attrs.frozen(kw_only=True)
class Pair:
    """Two implementations of one call; ``a`` is measured against ``b``."""

    a: str
    b: str
    difference: Difference
    tolerance: float
    """Of ``difference.relative``."""
    is_over: bool


@attrs.frozen(kw_only=True)
class CaseResult:
    """Everything about one call."""

    case: CrossCase
    runs: tuple[Run, ...]
    pairs: tuple[Pair, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether anything failed, broke a contract or is over its tolerance."""
        return any(pair.is_over for pair in self.pairs) or any(
            run.status == "failed" or run.violations for run in self.runs
        )


def find_availability(providers: Sequence[CrossProvider], device: torch.device) -> list[Availability]:
    """Ask each implementation, and build those that need it, once, before the calls."""
    return [_prepare(provider, device) for provider in providers]


def _prepare(provider: CrossProvider, device: torch.device) -> Availability:
    reason = provider.unavailable(device)
    if reason is not None:
        return Availability(provider=provider.name, status="unavailable", reason=reason)
    try:
        provider.prepare(device)
    except Exception as error:  # noqa: BLE001 - shown in the table and the exit status; the others still run
        return Availability(provider=provider.name, status="failed", reason=_describe(error))
    return Availability(provider=provider.name, status="ready")


def run_cases(
    cases: Sequence[CrossCase], names: Sequence[str], device: torch.device, *, workers: int
) -> Iterator[CaseResult]:
    """Results in the order of ``cases``, from ``workers`` processes with one thread each.

    Args:
        cases: the calls.
        names: of the implementations, which ``find_availability`` found ready.
        device: of the tensors; more than one worker is for the CPU.
        workers: 1 runs here.
    """
    if workers == 1:
        yield from (_run_by_names(case, tuple(names), device) for case in cases)
        return
    # A forked process would share the threads and the state of torch and Triton.
    context = multiprocessing.get_context("spawn")
    jobs = zip(cases, itertools.repeat(tuple(names)), itertools.repeat(device))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(device,)
    ) as pool:
        yield from pool.map(_run_by_names, *zip(*jobs, strict=True))


def _start_worker(device: torch.device) -> None:
    choose_interpreter(device)
    torch.set_num_threads(1)


def _run_by_names(case: CrossCase, names: Sequence[str], device: torch.device) -> CaseResult:
    return run_case(case, [provider for provider in list_cross_providers() if provider.name in names], device)


def run_case(case: CrossCase, providers: Sequence[CrossProvider], device: torch.device) -> CaseResult:
    """One call through every implementation, each on inputs of its own, and every pair compared."""
    reference = compute_reference(case, make_cross_inputs(case, device, math.nan))
    outputs: dict[str, tuple[Outputs, int]] = {REFERENCE: (reference, 0)}
    runs = []
    for provider in providers:
        reason = provider.why_not(case)
        if reason is not None:
            runs.append(Run(provider=provider.name, status="skipped", reason=reason))
            continue
        try:
            given, violations = _run_provider(provider, case, device, reference)
        except Exception as error:  # noqa: BLE001 - a finding about it; the others are still compared
            runs.append(Run(provider=provider.name, status="failed", reason=_describe(error)))
            continue
        outputs[provider.name] = given, provider.roundings if case.is_attention else 1
        runs.append(Run(provider=provider.name, status="ran", violations=tuple(violations)))
    return CaseResult(case=case, runs=tuple(runs), pairs=tuple(_compare_all(case, outputs)))


def _run_provider(
    provider: CrossProvider, case: CrossCase, device: torch.device, reference: Outputs
) -> tuple[Outputs, list[str]]:
    used = make_cross_inputs(case, device, math.nan)
    given = provider.run(case, used)
    violations = list_violations(case, make_cross_inputs(case, device, math.nan), used, given, reference)
    harmless = provider.run(case, make_cross_inputs(case, device, 0.0))
    violations += [
        f"{name}: its bits depend on memory that the call does not use"
        for name in differs_by_poison(given, harmless)
    ]
    return given, violations


def _compare_all(case: CrossCase, outputs: dict[str, tuple[Outputs, int]]) -> Iterator[Pair]:
    for (b, (want, b_roundings)), (a, (got, a_roundings)) in itertools.combinations(outputs.items(), 2):
        difference = measure_difference(got, want, case.dtype)
        tolerance = find_tolerance(case, a_roundings + b_roundings)
        yield Pair(
            a=a, b=b, difference=difference, tolerance=tolerance, is_over=exceeds(difference, tolerance)
        )


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
