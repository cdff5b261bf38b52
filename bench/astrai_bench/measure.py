"""One run of a kernel bench: check every provider, then time those that are right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeAlias

import attrs
import torch

from astrai_bench.cases import Case, Ceilings, count_bytes, count_flops, h200_ceilings, predict_seconds
from astrai_bench.inputs import (
    Inputs,
    choose_num_sets,
    copy_inputs,
    count_operand_bytes,
    leaves_cache,
    make_inputs,
)
from astrai_bench.machine import Machine, describe_machine, find_free_bytes
from astrai_bench.providers import Provider, is_interpreting
from astrai_bench.reference import TOLERANCE, Expected, collect, compute_expected, measure_error
from astrai_bench.timing import Timing, measure_ceilings, time_calls

Status: TypeAlias = Literal["timed", "wrong", "failed", "unavailable", "skipped"]
Progress: TypeAlias = Callable[[str, int, int], None]
"""What is going on, steps done, steps in all."""


@attrs.frozen(kw_only=True)
class Row:
    """What became of one provider."""

    provider: str
    status: Status
    label: str
    """The provider, and what is special about how it runs."""
    reason: str | None = None
    """Why it has no timing."""
    error: float | None = None
    """Largest relative error; see ``reference.measure_error``. None where nothing finite came out."""
    timing: Timing | None = None


@attrs.frozen(kw_only=True)
class Report:
    """What a run found."""

    case: Case
    machine: Machine
    ceilings: Ceilings
    tolerance: float
    num_sets: int
    """Sets of inputs that the calls rotate through."""
    is_cold: bool
    """Whether a set has left the cache when its turn comes again."""
    rows: tuple[Row, ...]

    @property
    def roofline_s(self) -> float:
        """Seconds the case needs at least on this machine."""
        return predict_seconds(self.case, self.ceilings)

    @property
    def h200_s(self) -> float:
        """Seconds the case needs at least on an NVIDIA H200."""
        return predict_seconds(self.case, h200_ceilings(self.case.dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes that any implementation moves."""
        return count_bytes(self.case)

    @property
    def num_flops(self) -> int:
        """Operations that any implementation computes."""
        return count_flops(self.case)


def run_bench(
    case: Case,
    providers: Sequence[Provider],
    device: torch.device,
    *,
    repeats: int,
    asked_for: Collection[str] = (),
    progress: Progress = lambda text, done, total: None,
) -> Report:
    """Check and time ``providers`` on ``case``.

    Args:
        case: what to run.
        providers: in the order of the rows.
        device: where to run it.
        repeats: samples per provider.
        asked_for: names given explicitly; Triton's interpreter is timed only then.
        progress: told what is going on.
    """
    total = len(providers) + 2
    progress("measuring the ceilings", 0, total)
    with torch.inference_mode():
        ceilings = measure_ceilings(device, case.dtype)
        progress("making inputs and the reference", 1, total)
        machine = describe_machine(device)
        original = make_inputs(case, device)
        expected = compute_expected(case, original)
        bytes_each = count_operand_bytes(original)
        num_sets = choose_num_sets(bytes_each, machine.cache_bytes, find_free_bytes(device))
        bench = _Bench(case, device, original, expected, num_sets, repeats)
        rows = []
        for idx, provider in enumerate(providers):
            progress(provider.name, idx + 2, total)
            rows.append(bench.run(provider, is_asked_for=provider.name in asked_for))
        progress("done", total, total)
    return Report(
        case=case,
        machine=machine,
        ceilings=ceilings,
        tolerance=TOLERANCE[case.dtype],
        num_sets=num_sets,
        is_cold=leaves_cache(num_sets, bytes_each, machine.cache_bytes),
        rows=tuple(rows),
    )


class _Bench:
    """What the providers of a run share."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        original: Inputs,
        expected: Expected,
        num_sets: int,
        repeats: int,
    ) -> None:
        self._case = case
        self._device = device
        self._original = original
        """Never given away, since some providers write to their inputs."""
        self._expected = expected
        self._num_sets = num_sets
        self._repeats = repeats
        self._sets: list[Inputs] = []

    def run(self, provider: Provider, *, is_asked_for: bool) -> Row:
        """Check ``provider``, and time it if it is right."""
        label = provider.name
        reason = provider.why_not(self._case, self._device)
        if reason is not None:
            return Row(provider=provider.name, label=label, status="unavailable", reason=reason)
        if provider.name == "triton" and is_interpreting():
            label = "triton (interpreter)"
            if not is_asked_for:
                reason = "the interpreter says nothing about speed; --backend triton times it all the same"
                return Row(provider=provider.name, label=label, status="skipped", reason=reason)
        try:
            row = self._check(provider, label)
            return row if row.status == "wrong" else self._time(provider, row)
        # A provider is somebody else's code: whatever it raises is what the table has to say about it.
        except Exception as error:  # noqa: BLE001 - the table shows it in the provider's row
            text = " ".join(str(error).split())
            reason = f"{type(error).__name__}: {text[:300]}"
            return Row(provider=provider.name, label=label, status="failed", reason=reason)

    def _check(self, provider: Provider, label: str) -> Row:
        assert provider.prepare is not None
        inputs = copy_inputs(self._original)
        result = provider.prepare(self._case, inputs)()
        error = measure_error(self._expected, collect(inputs, result))
        tolerance = TOLERANCE[self._case.dtype]
        if error <= tolerance:
            return Row(provider=provider.name, label=label, status="timed", error=error)
        is_finite = error < float("inf")
        found = f"is off by {error:.1e}" if is_finite else "has wrong shapes, NaN or Inf"
        return Row(
            provider=provider.name,
            label=label,
            status="wrong",
            reason=f"not timed: its result {found}, at most {tolerance:.1e} is right",
            error=error if is_finite else None,
        )

    def _time(self, provider: Provider, row: Row) -> Row:
        assert provider.prepare is not None
        if not self._sets:
            self._sets = [copy_inputs(self._original) for _ in range(self._num_sets)]
        calls = [provider.prepare(self._case, inputs) for inputs in self._sets]
        timing = time_calls(calls, self._device, self._repeats, capturable=provider.capturable)
        return attrs.evolve(row, timing=timing)
