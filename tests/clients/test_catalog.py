from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from clients.__main__ import main
from clients.catalog import CLIENTS, SCENARIOS, Client

HERE = Path(__file__).parent
PYTHON_CLIENTS = [client for client in CLIENTS if client.kind == "python"]


def list_scenarios(program: str) -> set[str]:
    """What a program hands to ``run``."""
    tree = ast.parse((HERE / "scenarios" / f"{program}.py").read_text())
    call = tree.body[-1].value  # type: ignore[attr-defined]
    assert call.func.id == "run"
    return {argument.attr if isinstance(argument, ast.Attribute) else argument.id for argument in call.args}


@pytest.mark.parametrize("program", sorted({client.program for client in PYTHON_CLIENTS}))
def test_a_program_has_what_its_clients_are_asked_to_do_and_no_more(program: str) -> None:
    asked = [client.scenarios for client in PYTHON_CLIENTS if client.program == program]
    assert list_scenarios(program) == {name for scenarios in asked for name in scenarios}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_gap_is_a_scenario(client: Client) -> None:
    assert set(client.gaps) <= set(SCENARIOS)


def test_every_python_package_is_pinned() -> None:
    files = {file.stem: file.read_text().splitlines() for file in (HERE / "requirements").iterdir()}
    assert set(files) == {client.environment for client in PYTHON_CLIENTS}
    for client in PYTHON_CLIENTS:
        names = [line.split("==")[0] for line in files[client.environment] if line.count("==") == 1]
        assert len(names) == len(files[client.environment])
        assert client.package in names


def test_every_npm_package_is_pinned_and_locked() -> None:
    wanted = json.loads((HERE / "js" / "package.json").read_text())["dependencies"]
    locked = json.loads((HERE / "js" / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    for client in CLIENTS:
        if client.kind == "js":
            assert client.package in wanted
            assert (HERE / "js" / f"{client.program}.mjs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--readme", "--python"],
        ["--readme", "--scenario", "text"],
        ["--readme", "--newest"],
        ["--only", "no"],
    ],
)
def test_wrong_arguments_start_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
