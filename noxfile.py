"""Checks of the project, each by its name: ``nox``, or ``nox -s lint tests``. Cheapest first.

Sessions run in the environment nox was started from; the README's second command makes it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "imports", "types", "tests", "static(triton='installed')", "mutants"]
nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = True

SOURCES = ["astrai_triton", "server", "bench", "tests", "noxfile.py"]

# What "static" compiles unless it is told otherwise: every head shape on every architecture in the dtype that
# is served most, and one shape of the kernels that are not attention.
STATIC_VARIANTS = ["decode_*_bf16", "prefill_*_bf16", "merge_*_d128_bf16", "rotary_*_d128_r128_bf16_half"]


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


@nox.session
@nox.parametrize("triton", ["installed", "3.6.0"])
def static(session: nox.Session, triton: str) -> None:
    """Compile kernels for every architecture without a GPU and check them; arguments go to the report.

    Runs once with the installed Triton and once, for sm_80 and sm_90, with the oldest that kernels compile
    on. The whole list is checked by ``-- --variant '*'``.
    """
    env: dict[str, str] = {}
    arguments = []
    if triton != "installed":
        env["PYTHONPATH"] = f"{fetch_triton(session, triton)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        if "--arch" not in session.posargs:
            arguments += ["--arch", "sm_80", "--arch", "sm_90"]
    if "--variant" not in session.posargs:
        arguments += [argument for glob in STATIC_VARIANTS for argument in ("--variant", glob)]
    command = ["-m", "astrai_bench", "static", "--check", *arguments, *session.posargs]
    session.run(sys.executable, *command, external=True, env=env)


def fetch_triton(session: nox.Session, version: str) -> Path:
    """Another Triton beside the installed packages: who puts the directory first in the path imports it."""
    target = Path(".nox").resolve() / f"triton-{version}"
    if not (target / "triton").exists():
        run_module(
            session, "pip", "install", "--quiet", "--no-deps", "--target", str(target), f"triton=={version}"
        )
    return target


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the kernels on purpose; every mutant must fail a test. Arguments are names of mutants."""
    session.run(sys.executable, "tests/mutants.py", *session.posargs, external=True)
