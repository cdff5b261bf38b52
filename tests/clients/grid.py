"""How every client fared: as a table for a terminal, as Markdown for README.md, and as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from rich.box import SIMPLE_HEAD
from rich.table import Table

from clients.catalog import SCENARIOS

START = "<!-- clients:start -->"
END = "<!-- clients:end -->"

HEADER_WIDTH = 11
"""Characters of a client's name on one line."""

_SYMBOLS = {"pass": "✓", "fail": "✗", "gap": "–"}
_STYLES = {"pass": "green", "fail": "bold red", "gap": "dim"}


@attrs.frozen(kw_only=True)
class Outcome:
    """How one scenario of one client went."""

    result: Literal["pass", "fail", "gap"]
    reason: str | None = None
    """Why it failed, or why the client cannot do it."""
    seconds: float = 0.0

    @classmethod
    def fail(cls, reason: str) -> Outcome:
        """A failure."""
        return cls(result="fail", reason=reason)

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Outcome:
        """What a client reports at the end of a scenario."""
        error = event["error"]
        result: Literal["pass", "fail"] = "pass" if error is None else "fail"
        return cls(result=result, reason=error, seconds=event["seconds"])


@attrs.frozen(kw_only=True)
class Column:
    """One client."""

    name: str
    version: str
    outcomes: Mapping[str, Outcome]
    """By scenario."""

    def count(self, result: str) -> int:
        """How many scenarios went like this."""
        return sum(outcome.result == result for outcome in self.outcomes.values())


def draw_grid(columns: Sequence[Column]) -> Table:
    """The table for a terminal."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        parts = column.name.replace("/", "/ ").split()
        name = "\n".join(textwrap.fill(part, HEADER_WIDTH) for part in parts)
        table.add_column(f"{name}\n{column.version}", justify="center", vertical="bottom", min_width=6)
    for name, title in _list_rows(columns):
        results = [column.outcomes[name].result if name in column.outcomes else None for column in columns]
        cells = [f"[{_STYLES[r]}]{_SYMBOLS[r]}[/]" if r is not None else "" for r in results]
        table.add_row(title, *cells)
    return table


def format_markdown(columns: Sequence[Column]) -> str:
    """The table for README.md, and beneath it why some clients cannot do some of it."""
    header = ["", *(f"{column.name} {column.version}" for column in columns)]
    rows = [header, ["---", *[":-:"] * len(columns)]]
    for name, title in _list_rows(columns):
        results = [column.outcomes[name].result if name in column.outcomes else None for column in columns]
        rows.append([title, *(_SYMBOLS[r] if r is not None else "" for r in results)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"{reason}: {', '.join(titles)}" for reason, titles in _group_gaps(columns).items()]
    why = [f"{_SYMBOLS['gap']} stands for: {'; '.join(notes)}."] if notes else []
    return "\n".join([*lines, "", *why]).rstrip()


def describe_grid(columns: Sequence[Column]) -> dict[str, Any]:
    """Everything, as plain values for JSON."""
    return {
        "clients": {
            column.name: {
                "version": column.version,
                "scenarios": {name: attrs.asdict(outcome) for name, outcome in column.outcomes.items()},
            }
            for column in columns
        },
        "passed": sum(column.count("pass") for column in columns),
        "failed": sum(column.count("fail") for column in columns),
        "gaps": sum(column.count("gap") for column in columns),
    }


def write_readme(path: Path, columns: Sequence[Column]) -> None:
    """Replace what stands between the two marks of ``path`` by the table.

    Raises:
        ValueError: the marks do not stand there once each, in order.
    """
    text = path.read_text()
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    if text.count(START) != 1 or text.count(END) != 1 or pattern.search(text) is None:
        raise ValueError(
            f"{path}: wanted one {START} and after it one {END}, got {text.count(START)} and "
            f"{text.count(END)}; put both where the table should stand"
        )
    # Not the text itself: a replacement string has escapes of its own.
    path.write_text(pattern.sub(lambda _: f"{START}\n\n{format_markdown(columns)}\n\n{END}", text))


def _list_rows(columns: Sequence[Column]) -> list[tuple[str, str]]:
    """Scenarios that anybody was asked to do, and their titles."""
    tried = {name for column in columns for name in column.outcomes}
    return [(name, title) for name, title in SCENARIOS.items() if name in tried]


def _group_gaps(columns: Sequence[Column]) -> dict[str, list[str]]:
    """Reason -> titles of the scenarios that it keeps clients from."""
    reasons: dict[str, list[str]] = {}
    for name, title in _list_rows(columns):
        outcomes = [column.outcomes[name] for column in columns if name in column.outcomes]
        for reason in dict.fromkeys(outcome.reason for outcome in outcomes if outcome.result == "gap"):
            reasons.setdefault(reason or "", []).append(title)
    return reasons
