"""Running the peers' scripts in turn with our own, so that a slow minute of the machine hits both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from astrai_bench.errors import BenchError

OWN = "astrai"
_PREFIX = "run_"

Progress = Callable[[str, int, int], None]
"""What runs, steps done, steps in all."""


@attrs.frozen(kw_only=True)
class Record:
    """What one script said."""

    round: int
    pair: str
    """The peer that this run is compared for."""
    peer: str
    load: float
    """Tasks that wanted a CPU, a minute's mean, just before."""
    result: dict[str, Any]


def find_scripts(directory: Path) -> dict[str, Path]:
    """Name -> script of every peer, our own included.

    Raises:
        BenchError: there are none.
    """
    scripts = {path.stem.removeprefix(_PREFIX): path for path in sorted(directory.glob(f"{_PREFIX}*.py"))}
    if OWN not in scripts:
        raise BenchError(f"{directory}: wanted the peers' scripts; run this from a checkout of astrai-triton")
    return scripts


def choose_peers(scripts: dict[str, Path], names: Sequence[str]) -> list[str]:
    """The peers to run: those named, else all but our own.

    Raises:
        BenchError: there is none of a name.
    """
    known = [name for name in scripts if name != OWN]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise BenchError(f"--peer: wanted one of {', '.join(known)}, got {', '.join(wrong)}")
    return list(names) or known


def run_rounds(
    scripts: dict[str, Path],
    peers: Sequence[str],
    rounds: int,
    arguments: Sequence[str],
    progress: Progress = lambda text, done, total: None,
) -> list[Record]:
    """Run ours, then a peer, for each peer, ``rounds`` times over. A peer that fails is not run again.

    Args:
        scripts: from ``find_scripts``.
        peers: names of scripts.
        rounds: at least 1.
        arguments: for every script.
        progress: told what runs.

    Raises:
        BenchError: our own script failed.
    """
    records: list[Record] = []
    failed: set[str] = set()
    total, done = rounds * len(peers) * 2, 0
    for idx in range(rounds):
        for pair in peers:
            if pair in failed:
                done += 2
                continue
            for name in (OWN, pair):
                progress(f"round {idx + 1}: {name}", done, total)
                record = Record(
                    round=idx,
                    pair=pair,
                    peer=name,
                    load=os.getloadavg()[0],
                    result=run_script(scripts[name], [*arguments, *(_OWN_ARGUMENTS if name == OWN else ())]),
                )
                done += 1
                records.append(record)
                if "reason" in record.result:
                    if name == OWN:
                        raise BenchError(f"our own run failed: {record.result['reason']}")
                    failed.add(name)
    progress("done", total, total)
    return records


# What the others are compared with: the type that the server chooses on a CPU with AMX.
_OWN_ARGUMENTS = ("--variant", "bf16")


def run_script(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a script prints last; one with a ``reason`` where it prints none."""
    run = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    last = run.stdout.strip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        said = " ".join(run.stderr.split())[-300:]
        return {"peer": script.stem, "variants": {}, "reason": f"status {run.returncode}: {said}"}
    return result
