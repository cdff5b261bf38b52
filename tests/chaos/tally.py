"""What a run counts, and what it holds against the server."""

from __future__ import annotations

import sys

import attrs

MAX_SHOWN = 40


@attrs.define
class Tally:
    """Counts of one run."""

    phase: str = ""
    num_requests: int = 0
    """Whole requests that were answered."""
    num_bad_inputs: int = 0
    """What no honest client sends, or how none behaves."""
    num_faults: int = 0
    """Injected into the server."""
    num_pages_lost: int = 0
    num_canary_answers: int = 0
    num_canary_differences: int = 0
    num_canary_errors: int = 0
    """Where they had to be expected."""
    num_preemptions: int = 0
    num_evictions: int = 0
    violations: list[str] = attrs.field(factory=list)

    def blame(self, what: str) -> None:
        """Note something that must not be, and say so at once."""
        self.violations.append(f"{self.phase}: {what}")
        if len(self.violations) <= MAX_SHOWN:
            print(f"FAIL {self.violations[-1]}", file=sys.stderr, flush=True)  # noqa: T201

    def describe(self) -> dict[str, int]:
        """The counts, for the last line of a run."""
        return {
            "bad_inputs": self.num_bad_inputs,
            "faults_survived": self.num_faults,
            "pages_lost": self.num_pages_lost,
            "canary_answers": self.num_canary_answers,
            "canary_differences": self.num_canary_differences,
            "canary_errors_where_meant": self.num_canary_errors,
            "requests": self.num_requests,
            "preemptions": self.num_preemptions,
            "evicted_pages": self.num_evictions,
            "violations": len(self.violations),
        }
