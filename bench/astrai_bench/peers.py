"""``astrai bench peers``: other engines beside ours, on this machine, with the same weights."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from astrai_bench.peers_run import OWN, Record, choose_peers, estimate_s, find_scripts, run_rounds

FORMAT = 1
BUSY_LOAD = 0.5
"""Tasks a CPU before a run, above which its times are not worth much."""

_BENCH = Path(__file__).resolve().parents[1]


@click.command(short_help="Other engines beside ours: install, run in turn, ratios.")
@click.option(
    "--peer", "names", multiple=True, help="Peer to run, NAME or NAME:VARIANT, repeatable.  [default: all]"
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each, in turn.")
@click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".nox/peers"),
    show_default=True,
    help="Where environments and weights are made and kept.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=_BENCH / "results",
    help="Directory of the JSON file.  [default: bench/results]",
)
@click.option(
    "--readme",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_BENCH.parent / "README.md",
    help="File with the marks of the table.  [default: the README]",
)
@click.option(
    "--scripts",
    type=click.Path(file_okay=False, path_type=Path),
    default=_BENCH / "peers",
    help="Directory of the peers' scripts.  [default: bench/peers]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def peers(
    names: Sequence[str],
    rounds: int,
    home: Path,
    results: Path,
    readme: Path,
    scripts: Path,
    arguments: Sequence[str],
) -> None:
    """Measure other engines in turn with ours: ours, a peer, ours, the next peer, round after round.

    Each peer is installed in an environment of its own on first use (minutes to an hour), gets the same
    weights and the same workloads: one stream, a long prompt, 16 requests at once, and 8 clients of its
    server. A peer that cannot be installed or run is a row with the reason. Before the first round the
    expected time is told. The table goes between the marks <!-- peers:start --> and <!-- peers:end --> of the
    README, the figures into a file of --results. ARGUMENTS after -- go to every script, e.g. -- --repeats 1
    --no-http.
    """
    from rich.console import Console
    from rich.progress import Progress

    from astrai_bench.peers_report import build_rows, format_section, name_result, replace_section

    found = find_scripts(scripts)
    chosen = choose_peers(found, names)
    console = Console()
    expected_s = estimate_s(list(chosen), rounds, read_earlier(results))
    console.print(f"About {expected_s / 60:.0f} min; on first use also the installation.", highlight=False)
    with Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("peers")

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        records = run_rounds(found, chosen, rounds, ["--home", str(home), *arguments], tell)
    rows = build_rows(records)
    document = build_document(records, rounds, home)
    document["rows"] = [attrs.asdict(row) for row in rows]
    section = format_section(document, rows)
    console.print(section, markup=False, highlight=False, soft_wrap=True)
    # Later ones have this run's own load.
    busy = records[0].load
    if busy > BUSY_LOAD * (os.cpu_count() or 1):
        console.print(f"The machine was BUSY (load {busy:.1f}): these times are not worth much.")
    results.mkdir(parents=True, exist_ok=True)
    path = results / name_result(document["machine"]["name"], document["date"])
    line = json.dumps(document, separators=(",", ":"))
    path.write_text(line + "\n", encoding="utf-8")
    if not replace_section(readme, section):
        console.print(f"{readme} has no marks for the table, so it stays as it is.", soft_wrap=True)
    click.echo(line)


def read_earlier(results: Path) -> list[dict[str, Any]]:
    """Records of the last run on this machine, as far as ``results`` has one."""
    import torch

    from astrai_bench.machine import describe_machine
    from astrai_bench.peers_report import name_result

    name = name_result(describe_machine(torch.device("cpu")).name, "*")
    for path in sorted(results.glob(name), reverse=True):
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["records"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return []


def build_document(records: Sequence[Record], rounds: int, home: Path) -> dict[str, Any]:
    """The JSON object of a run, without its rows."""
    import torch

    from astrai_bench.machine import describe_machine

    own = next(record.result for record in records if record.peer == OWN)
    result: Mapping[str, Any] = next(iter(own["variants"].values()))
    weights = home / "weights" / "ready.json"
    model = json.loads(weights.read_text(encoding="utf-8"))["model"] if weights.exists() else "unknown model"
    return {
        "format": FORMAT,
        "bench": "peers",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": attrs.asdict(describe_machine(torch.device("cpu"))),
        "model": model,
        "threads": own.get("threads"),
        "rounds": rounds,
        "sizes": result["sizes"],
        "records": [attrs.asdict(record) for record in records],
    }
