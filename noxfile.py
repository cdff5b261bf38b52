"""Checks of the project, each by its name: ``nox``, or ``nox -s lint tests``. Cheapest first.

Sessions run in the environment nox was started from; the README's second command makes it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

OLDEST_TRITON = "3.6.0"
"""The first that the kernels compile on; ``pyproject.toml`` asks for it."""

nox.options.sessions = [
    "lint",
    "imports",
    "types",
    "tests",
    f"static(triton='{OLDEST_TRITON}')",
    "static(triton='installed')",
    "cuda_compile",
    "cross",
    "mutants",
    "chaos",
    "clients",
]
nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = True

IS_CI = "CI" in os.environ
"""Where a check that lacks a tool fails; elsewhere it is skipped and says what it needs."""

SOURCES = ["astrai_triton", "cuda_ref", "server", "bench", "tests", "noxfile.py"]

# What "static" compiles unless told otherwise. On every architecture: every kernel in every dtype, of one
# head shape and the kind that the engine launches. Where tiles differ most: the other kinds and head shapes.
STATIC_EVERYWHERE = [
    "decode_paged_split_h32_8_d128_128_*",
    "prefill_paged_g4_d128_*",
    "merge_splits_paged_h32_8_d128_*",
    "merge_states_*",
    "merge_prefill_paged_d128_*",
    "rotary_emb_*_d128_r128_*_half",
    "rotary_append_*_d128_r128_*_half*",
]
STATIC_SHAPES = [
    "decode_[de]*_h32_8_d128_128_bf16",
    "decode_paged_split_h[!3]*_bf16",
    "prefill_dense_causal_g4_*_bf16",
    "prefill_paged_window_g4_*_bf16",
    "prefill_every_option_*_bf16",
    "prefill_paged_g[23]_*_bf16",
]
STATIC_SHAPE_ARCHES = ["sm_80", "sm_90", "sm_120"]


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
@nox.parametrize("triton", [OLDEST_TRITON, "installed"])
def static(session: nox.Session, triton: str) -> None:
    """Compile a part of the kernels for every architecture, without a GPU, and check them.

    Arguments after ``--`` go to the report, instead of that part.
    """
    if session.posargs:
        check_kernels(session, triton, *session.posargs)
        return
    check_kernels(session, triton, *repeat("--variant", STATIC_EVERYWHERE))
    check_kernels(
        session, triton, *repeat("--arch", STATIC_SHAPE_ARCHES), *repeat("--variant", STATIC_SHAPES)
    )


@nox.session
@nox.parametrize("triton", [OLDEST_TRITON, "installed"])
def static_full(session: nox.Session, triton: str) -> None:
    """The same for every variant of every kernel: a quarter of an hour with two CPUs; not by default."""
    check_kernels(session, triton, *session.posargs)


def check_kernels(session: nox.Session, triton: str, *arguments: str) -> None:
    """``astrai bench static --check`` with one version of Triton."""
    env: dict[str, str] = {}
    if triton != "installed":
        env["PYTHONPATH"] = f"{fetch_triton(session, triton)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = ["-m", "astrai_bench", "static", "--check", *arguments]
    session.run(sys.executable, *command, external=True, env=env)


def repeat(option: str, values: list[str]) -> list[str]:
    """``values`` as a repeated command-line option."""
    return [argument for value in values for argument in (option, value)]


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


@nox.session
def cuda_compile(session: nox.Session) -> None:
    """Compile the CUDA kernels for every architecture without a GPU; spills and budgets are faults."""
    if not shutil.which("nvcc") and "CUDA_HOME" not in os.environ and not IS_CI:
        session.skip("needs nvcc: install the CUDA toolkit, or set CUDA_HOME to where it is")
    run_module(session, "cuda_ref.compile_matrix", "--check", *session.posargs)


# A release with no CPU wheel in the usual find-links: pip then takes PyPI's, which is built for CUDA.
CUDA_TORCH = "2.14.1"


@nox.session(venv_backend="venv")
def cuda_build(session: nox.Session) -> None:
    """Build the CUDA extension without a GPU and import it. Downloads 5.5 GB, so only when asked for."""
    session.install(f"torch=={CUDA_TORCH}", "ninja", "setuptools", "-e", ".")
    command = "import cuda_ref; print(cuda_ref.build('cuda'))"
    session.run("python", "-c", command, env={"TORCH_CUDA_ARCH_LIST": "9.0"})


@nox.session
def cross(session: nox.Session) -> None:
    """Triton, CUDA and torch against each other and against float64; arguments go to the command."""
    required = "triton,cuda_scalar,cuda_mma"
    if not shutil.which(os.environ.get("CXX", "c++")) and not IS_CI:
        session.warn("without a C++ compiler the CUDA reference stays out; install g++")
        required = "triton"
    run_module(session, "astrai_bench", "cross", "--brief", "--require", required, *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Attack a real server process; arguments (--long, --seed N, --only PHASE, --logs DIR) go to it."""
    paths = os.pathsep.join(filter(None, ["tests", os.environ.get("PYTHONPATH", "")]))
    # One seed, so that the same inputs come every time; others are for those who look for more.
    arguments = session.posargs or ["--seed", "1"]
    session.run(sys.executable, "-m", "chaos", *arguments, external=True, env={"PYTHONPATH": paths})


@nox.session
def clients(session: nox.Session) -> None:
    """Unmodified clients of both protocols against a real server process; arguments go to it.

    ``--only NAME``, ``--scenario NAME``, ``--python``, ``--js``, ``--newest``, ``--readme``. The JavaScript
    clients stay out where node and npm are missing.
    """
    paths = os.pathsep.join(filter(None, ["tests", os.environ.get("PYTHONPATH", "")]))
    session.run(sys.executable, "-m", "clients", *session.posargs, external=True, env={"PYTHONPATH": paths})


@nox.session
def soak(session: nox.Session) -> None:
    """A million operations on engines that fail, and 201 pairs of real answers; not by default."""
    env = {"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"}
    arguments = session.posargs or ["--operations", "1000000", "--seed", "0", "--check-every", "10"]
    session.run(sys.executable, "-m", "soak", *arguments, external=True, env=env)
    pairs = ["tests/end_to_end/test_exactness.py", "-s"]
    env["ASTRAI_EXACTNESS_REQUESTS"] = "67"
    session.run(sys.executable, "-m", "pytest", *pairs, external=True, env=env)
