"""Where the clients are installed: virtual environments, and one folder of node packages.

Each is kept under ``.nox/clients`` with what it was made from, and made again only when that changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from clients.catalog import Client

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / ".nox" / "clients"
JS_TOOLS = ("node", "npm")

_HERE = Path(__file__).parent
_MARKER = "made-from.txt"
_JS_PACKAGES = ("package.json", "package-lock.json")


class InstallError(Exception):
    """An environment could not be made; the text is what its installer said."""


def missing_js_tools() -> list[str]:
    """What the JavaScript clients need and this machine lacks."""
    return [tool for tool in JS_TOOLS if shutil.which(tool) is None]


def make_environment(name: str, clients: Sequence[Client], *, is_newest: bool = False) -> Path:
    """Install what ``clients`` need, unless it is there.

    Args:
        name: of the environment.
        clients: all of one kind and one environment.
        is_newest: take the newest versions instead of the pinned ones; always asks the registry.

    Returns:
        Its folder.

    Raises:
        InstallError: the installer failed.
    """
    folder = HOME / (f"{name}-newest" if is_newest else name)
    packages = sorted({client.package for client in clients})
    if clients[0].kind == "js":
        _make_js(folder, packages if is_newest else None)
    else:
        _make_python(folder, name, packages if is_newest else None)
    return folder


def command_of(client: Client, folder: Path) -> list[str]:
    """What runs the scenarios of a client that is installed in ``folder``; their names follow."""
    if client.kind == "js":
        return ["node", str(folder / f"{client.program}.mjs")]
    return [str(_python_of(folder)), "-m", f"clients.scenarios.{client.program}"]


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _make_python(folder: Path, name: str, newest: Sequence[str] | None) -> None:
    requirements = _HERE / "requirements" / f"{name}.txt"
    made_from = f"{sys.version}\n{requirements.read_text()}"
    if newest is None and _is_made_from(folder, made_from):
        return
    if newest is None or not folder.exists():
        # Its own pip would take longer to make than the rest.
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
    wanted = ["-r", str(requirements)] if newest is None else ["--upgrade", *newest]
    pip = [sys.executable, "-m", "pip", "--python", str(_python_of(folder))]
    _run([*pip, "install", "--quiet", "--no-compile", "--disable-pip-version-check", *wanted])
    (folder / _MARKER).write_text(made_from)


def _make_js(folder: Path, newest: Sequence[str] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = _HERE / "js"
    # Node looks for packages beside the program.
    for program in source.glob("*.mjs"):
        shutil.copy(program, folder)
    shutil.copy(_HERE / "scenarios" / "cases.json", folder)
    made_from = (source / _JS_PACKAGES[1]).read_text()
    if newest is None and _is_made_from(folder, made_from):
        return
    (folder / _MARKER).unlink(missing_ok=True)
    for file in _JS_PACKAGES:
        shutil.copy(source / file, folder)
    npm = ["npm", "--no-audit", "--no-fund", "--loglevel=error"]
    _run([*npm, "ci"], folder)
    if newest is not None:
        # Not @latest: that may want a newer Node than is here.
        _run([*npm, "install", *(f"{package}@*" for package in [*newest, "ai"])], folder)
    (folder / _MARKER).write_text(made_from)


def _is_made_from(folder: Path, made_from: str) -> bool:
    marker = folder / _MARKER
    return marker.exists() and marker.read_text() == made_from


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}")
