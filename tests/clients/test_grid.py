from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from clients.grid import END, START, Column, Outcome, describe_grid, draw_grid, format_markdown, write_readme

PASS = Outcome(result="pass", seconds=0.5)
FAIL = Outcome.fail(r"wanted \1, got [red]")
COLUMNS = [
    Column(name="one", version="1.0", outcomes={"text": PASS, "tools": FAIL}),
    Column(
        name="two",
        version="2.0",
        outcomes={"text": PASS, "tools": Outcome(result="gap", reason="came with two 3.0")},
    ),
]
TABLE = """\
|  | one 1.0 | two 2.0 |
| --- | :-: | :-: |
| text | ✓ | ✓ |
| tool call | ✗ | – |

– stands for: came with two 3.0: tool call."""


def test_the_markdown_has_a_row_for_each_scenario_and_the_reasons_of_gaps() -> None:
    assert format_markdown(COLUMNS) == TABLE


def test_a_reason_names_each_of_its_scenarios_once() -> None:
    gap = Outcome(result="gap", reason="too old")
    columns = [Column(name=name, version="1", outcomes={"text": gap, "tools": gap}) for name in ("a", "b")]
    assert format_markdown(columns).endswith("\n– stands for: too old: text, tool call.")


def test_a_grid_without_gaps_ends_with_its_table() -> None:
    columns = [Column(name="one", version="1", outcomes={"text": PASS})]
    assert format_markdown(columns) == "|  | one 1 |\n| --- | :-: |\n| text | ✓ |"


def test_the_table_of_the_terminal_shows_every_result() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(draw_grid(COLUMNS))
    lines = [line.split() for line in capture.get().splitlines()]
    assert ["1.0", "2.0"] in lines
    assert ["text", "✓", "✓"] in lines
    assert ["tool", "call", "✗", "–"] in lines


def test_the_summary_is_json_and_counts() -> None:
    summary = json.loads(json.dumps(describe_grid(COLUMNS)))
    assert (summary["passed"], summary["failed"], summary["gaps"]) == (2, 1, 1)
    assert summary["clients"]["one"]["scenarios"]["text"] == {
        "result": "pass",
        "reason": None,
        "seconds": 0.5,
    }
    assert summary["clients"]["two"]["version"] == "2.0"


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{START}\nold\n{END}\n\nrest\n")
    for _ in range(2):
        write_readme(readme, COLUMNS)
        assert readme.read_text() == f"# Title\n\n{START}\n\n{TABLE}\n\n{END}\n\nrest\n"


@pytest.mark.parametrize("text", ["", START, END, f"{END} {START}", f"{START} {END} {START} {END}"])
def test_a_readme_without_a_place_for_the_table_is_an_error(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="wanted one"):
        write_readme(readme, COLUMNS)
    assert readme.read_text() == text
