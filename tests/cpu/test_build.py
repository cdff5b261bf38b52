"""What a build needs, and what becomes of one that goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from astrai_triton.cpu import BuildError, build, is_built, why_not_build
from cpu_kernels import needs_kernels

ASK = "from astrai_triton.cpu import build; build('plain')"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path))
    return tmp_path / "cpu"


def write_compiler(path: Path, body: str) -> str:
    """A compiler that does something else; it gets the name of its output in ``$out``."""
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo fake; exit 0; fi\n'
        'for word; do [ "$before" = -o ] && out=$word; before=$word; done\n' + body
    )
    path.chmod(0o755)
    return str(path)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' is not in PATH" in why_not_build("plain")
    with pytest.raises(BuildError, match="no-such-compiler"):
        build("plain")


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match=r"isa: wanted one of amx, .*, got 'sse9'"):
        why_not_build("sse9")


def test_what_the_compiler_says_is_passed_on(home, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "cxx", "echo 'error: no such thing' >&2; exit 1"))
    with pytest.raises(BuildError, match="error: no such thing"):
        build("plain")
    assert not list(home.glob("*.so"))


@needs_kernels
@pytest.mark.parametrize(
    ("check", "message"),
    [("return 1;", "failed their check"), ("__builtin_trap();", "failed their check")],
    ids=["wrong", "crash"],
)
def test_a_library_that_fails_its_check_is_never_installed(check, message, home, tmp_path, monkeypatch):
    source = tmp_path / "fake.cpp"
    source.write_text(f'extern "C" int astrai_check() {{ {check} }}')
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "cxx", f'c++ -shared -fPIC {source} -o "$out"'))
    with pytest.raises(BuildError, match=message):
        build("plain")
    assert not list(home.glob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", write_compiler(tmp_path / "cxx", "exit 1"))
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set ASTRAI_HOME to a directory"):
        build("plain")


@needs_kernels
def test_of_two_processes_that_ask_at_once_one_builds(home):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asking = [
        subprocess.Popen([sys.executable, "-c", ASK], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in asking]
    assert [process.returncode for process in asking] == [0, 0], said
    assert sum("building the CPU kernels" in text for text in said) == 1
    assert len(list(home.glob("*.so"))) == 1
    assert not [path for path in home.iterdir() if path.is_dir()]


@needs_kernels
def test_a_build_is_known_to_be_there_only_once_it_is(home):
    assert not is_built("plain")
    build("plain")
    assert is_built("plain")


@needs_kernels
def test_a_build_that_nobody_wants_any_more_ends_with_all_it_started(home, tmp_path, monkeypatch, capfd):
    pid = tmp_path / "pid"
    # A compiler leaves the work to another process.
    monkeypatch.setenv(
        "CXX",
        write_compiler(tmp_path / "cxx", f"sleep 600 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"),
    )
    cancelled, errors = threading.Event(), []

    def ask() -> None:
        with pytest.raises(BuildError, match="given up") as caught:
            build("plain", cancelled=cancelled)
        errors.append(caught)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 60
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = int(pid.read_text())
    # Set once the compiler runs.
    while os.getpriority(os.PRIO_PROCESS, worker) != 19 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.getpriority(os.PRIO_PROCESS, worker) == 19
    cancelled.set()
    thread.join(60)
    assert errors
    assert not is_running(worker)
    assert not [path for path in home.iterdir() if path.is_dir()]
    assert capfd.readouterr().err == ""


def is_running(pid: int) -> bool:
    """Not gone, and no zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
