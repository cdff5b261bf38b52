"""Checks of the project, each by its name: ``nox``, or ``nox -s lint tests``. Cheapest first.

Sessions run in the environment nox was started from; the README's second command makes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "imports", "types", "tests"]
nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = True

SOURCES = ["astrai_triton", "server", "tests", "noxfile.py"]


def run_module(session: nox.Session, *command: str) -> None:
    """``python -m`` in this environment, whatever stands on PATH."""
    session.run(sys.executable, "-m", *command, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint rules."""
    run_module(session, "ruff", "format", "--check", *SOURCES)
    run_module(session, "ruff", "check", *SOURCES)


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom."""
    session.run(str(Path(sys.executable).parent / "lint-imports"), external=True)


@nox.session
def types(session: nox.Session) -> None:
    """mypy strict over the packages."""
    run_module(session, "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; arguments after ``--`` go to pytest."""
    # Small tensors gain nothing from more threads, and timings of a busy machine get worse.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_module(session, "pytest", *session.posargs)
