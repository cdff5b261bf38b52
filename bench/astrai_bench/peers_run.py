"""Running the peers' scripts in turn with our own, so that a slow minute of the machine hits both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    wall_s: float
    """How long it took, installation and preparation included."""
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


def choose_peers(scripts: Mapping[str, Path], wanted: Sequence[str]) -> dict[str, list[str]]:
    """The peers to run, and of each the variants; an empty list is all of them.

    Args:
        scripts: from ``find_scripts``.
        wanted: names, or ``NAME:VARIANT``; empty is every peer but our own.

    Raises:
        BenchError: there is no peer of a name. A variant is only known to the script.
    """
    known = [name for name in scripts if name != OWN]
    chosen: dict[str, list[str]] = {}
    for text in wanted or known:
        name, _, variant = text.partition(":")
        if name not in known:
            raise BenchError(f"--peer: wanted one of {', '.join(known)}, got {name}")
        chosen.setdefault(name, []).extend([variant] if variant else [])
    return chosen


def estimate_s(peers: Sequence[str], rounds: int, earlier: Sequence[Mapping[str, Any]]) -> float:
    """How long a run will take, in seconds.

    Args:
        peers: names of scripts.
        rounds: at least 1.
        earlier: records of an earlier run on this machine, each as a mapping, perhaps none.
    """
    seconds: dict[str, float] = {}
    for record in earlier:
        # The first round may have installed the peer.
        seconds[record["peer"]] = record.get("wall_s", _GUESS_S)
    return rounds * sum(seconds.get(name, _GUESS_S) for peer in peers for name in (OWN, peer))


def run_rounds(
    scripts: Mapping[str, Path],
    peers: Mapping[str, Sequence[str]],
    rounds: int,
    arguments: Sequence[str],
    progress: Progress = lambda text, done, total: None,
) -> list[Record]:
    """Run ours, then a peer, for each peer, ``rounds`` times over. A peer that fails is not run again.

    Args:
        scripts: from ``find_scripts``.
        peers: from ``choose_peers``.
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
                load, started = os.getloadavg()[0], time.monotonic()
                variants = _OWN_VARIANTS if name == OWN else peers[pair]
                chosen = [part for variant in variants for part in ("--variant", variant)]
                result = run_script(scripts[name], [*arguments, *chosen])
                wall_s = round(time.monotonic() - started, 1)
                record = Record(round=idx, pair=pair, peer=name, load=load, wall_s=wall_s, result=result)
                done += 1
                records.append(record)
                if "reason" in record.result:
                    if name == OWN:
                        raise BenchError(f"our own run failed: {record.result['reason']}")
                    failed.add(name)
    progress("done", total, total)
    return records


# What the others are compared with: the type that the server chooses on a CPU with AMX, and its 8 bits.
_OWN_VARIANTS = ("bf16", "int8")

_GUESS_S = 180.0
"""Of a script that has not run here before, all variants."""


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
