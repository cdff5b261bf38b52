"""``python -m soak --operations 1000000 --seed 0``: exit 0 if nothing was found wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch

from soak.life import live


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments``, run, and print what happened as one line of JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="soak", description="A long life of an engine.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of everything; the same seed does the same")
    parser.add_argument(
        "--check-every", type=int, default=10, help="operations from one check of the whole pool to the next"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.perf_counter()
    tally = live(options.operations, options.seed, options.check_every)
    seconds = time.perf_counter() - started
    for difference in tally.differences[:10]:
        sys.stdout.write(difference + "\n")
    report = {
        "operations": options.operations,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "operations_per_s": round(options.operations / seconds),
        "full_checks": tally.num_full_checks,
        "tasks": tally.num_tasks,
        "refused": tally.num_refused,
        "ended": tally.num_ended,
        "faults": tally.num_struck,
        "preemptions": tally.num_preempted,
        "evicted_pages": tally.num_evicted,
        "leaked_pages": tally.num_leaked_pages,
        "differences": len(tally.differences),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if tally.differences or tally.num_leaked_pages else 0


if __name__ == "__main__":
    sys.exit(main())
