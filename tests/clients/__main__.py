"""``python -m clients``: install the clients, run them all against one server, print the grid.

Exit 0 if nothing failed, 1 if something did, 2 for wrong arguments. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.markup import escape

from clients.catalog import CLIENTS, SCENARIOS, Client
from clients.environment import HOME, ROOT, InstallError, command_of, make_environment, missing_js_tools
from clients.grid import Column, Outcome, describe_grid, draw_grid, write_readme
from clients.process import KEY, ServerError, run_server, try_client

NUM_WORKERS = 2
GRID_WIDTH = 170
"""Columns, where the output is no terminal."""
REASON_CHARS = 400
"""Of a failure on the terminal; all of it is in the JSON and in the client's log."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` and run. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="clients", description="Run real clients against a real server.")
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", choices=names, help="this client; may be given again")
    parser.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="only this; may be given again"
    )
    parser.add_argument("--python", action="store_true", help="Python clients")
    parser.add_argument("--js", action="store_true", help="JavaScript clients")
    parser.add_argument("--newest", action="store_true", help="newest versions instead of the pinned ones")
    parser.add_argument("--readme", action="store_true", help="write the grid into README.md")
    options = parser.parse_args(arguments)
    kinds = {kind for kind in ("python", "js") if getattr(options, kind)} or {"python", "js"}
    clients = [
        client
        for client in CLIENTS
        if client.kind in kinds
        and (not options.only or client.name in options.only)
        and not (options.newest and client.is_oldest)
    ]
    missing = missing_js_tools()
    if missing and any(client.kind == "js" for client in clients):
        if options.js or options.only:
            parser.error(f"the JavaScript clients need {' and '.join(missing)}; install Node.js 20 or newer")
        say(f"without {' and '.join(missing)} the JavaScript clients stay out; install Node.js 20 or newer")
        clients = [client for client in clients if client.kind != "js"]
    if options.readme and (len(clients) < len(CLIENTS) or options.scenario):
        parser.error("--readme wants the whole grid: all clients, pinned, with all scenarios")
    return run(clients, options.scenario or list(SCENARIOS), options.newest, options.readme)


def run(clients: Sequence[Client], scenarios: Sequence[str], is_newest: bool, is_for_readme: bool) -> int:
    """Try ``clients``, print what came of it, and say whether all is well."""
    started = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else GRID_WIDTH, highlight=False)
    logs = HOME / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    by_environment = itertools.groupby(
        sorted(clients, key=lambda client: client.environment), key=lambda client: client.environment
    )
    environments = [(name, list(group)) for name, group in by_environment]
    columns: dict[str, Column] = {}
    fault: str | None = None
    try:
        with run_server(logs / "server.log") as url, ThreadPoolExecutor(NUM_WORKERS) as pool:

            def try_environment(environment: tuple[str, list[Client]]) -> None:
                for column in _try_environment(*environment, scenarios, url, is_newest):
                    columns[column.name] = column
                    report(console, column)

            list(pool.map(try_environment, environments))
    except ServerError as error:
        fault = str(error)
    ordered = [columns[client.name] for client in clients if client.name in columns]
    console.print(draw_grid(ordered))
    if fault is not None:
        console.print(f"[bold red]{escape(fault)}[/]")
    elif is_for_readme:
        write_readme(ROOT / "README.md", ordered)
    summary = describe_grid(ordered) | {"fault": fault, "seconds": round(time.monotonic() - started, 1)}
    say(json.dumps(summary))
    return 1 if summary["failed"] or fault is not None else 0


def _try_environment(
    name: str, clients: Sequence[Client], scenarios: Sequence[str], url: str, is_newest: bool
) -> list[Column]:
    """Install one environment and run its clients, one after the other."""
    try:
        folder = make_environment(name, clients, is_newest=is_newest)
    except InstallError as error:
        lost = Outcome.fail(str(error))
        return [
            _complete(client, "?", dict.fromkeys(client.scenarios, lost), scenarios) for client in clients
        ]
    columns = []
    for client in clients:
        wanted = [scenario for scenario in client.scenarios if scenario in scenarios]
        env = {
            "CLIENTS_URL": url,
            "CLIENTS_KEY": KEY,
            "CLIENTS_PACKAGE": client.package,
            "PYTHONPATH": str(ROOT / "tests"),
            # Nothing may be fetched, and nobody told, while clients run; the server is on this machine.
            "NO_PROXY": "127.0.0.1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        }
        log = HOME / "logs" / f"{re.sub(r'[^a-z0-9]+', '-', client.name).strip('-')}.log"
        version, outcomes = try_client(command_of(client, folder), wanted, env, log)
        columns.append(_complete(client, version, outcomes, scenarios))
    return columns


def _complete(client: Client, version: str, outcomes: dict[str, Outcome], scenarios: Sequence[str]) -> Column:
    """The column of a client, with what it cannot do."""
    gaps = {name: Outcome(result="gap", reason=reason) for name, reason in client.gaps.items()}
    found = gaps | outcomes
    return Column(
        name=client.name,
        version=version,
        outcomes={name: found[name] for name in SCENARIOS if name in scenarios},
    )


def report(console: Console, column: Column) -> None:
    """One line for a client, and one for each of its failures."""
    seconds = sum(outcome.seconds for outcome in column.outcomes.values())
    passed, failed = column.count("pass"), column.count("fail")
    lines = [f"{column.name} {column.version}: {passed} passed, {failed} failed, {seconds:.1f} s"]
    lines += [
        f"  {name}: {outcome.reason}" for name, outcome in column.outcomes.items() if outcome.result == "fail"
    ]
    console.print(escape("\n".join(lines)), soft_wrap=True)


def say(line: str) -> None:
    """One line for whoever watches."""
    print(line, flush=True)  # noqa: T201 - a command talks to its terminal


if __name__ == "__main__":
    sys.exit(main())
