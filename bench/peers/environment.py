"""A virtual environment for one peer, made again when what it needs has changed. Standard library only."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 3


MEDIA = ("torchvision", "torchaudio", "torchcodec")
"""Packages for pictures and sound: PyPI's need CUDA's torch, and beside torch for CPUs cannot be imported."""


class SetupError(Exception):
    """A peer cannot be installed or run here; the text is what its row will say."""


@dataclass(frozen=True)
class Environment:
    """Where one peer is installed."""

    directory: Path
    log: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.directory / "bin" / "python"

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """Run a step of the installation; its output goes to the log.

        Raises:
            SetupError: it failed; the text has the last lines of its output.
        """
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            start = log.tell()
            path = f"{self.directory / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
            variables = {**os.environ, "PATH": path, **(env or {})}
            try:
                run = subprocess.run(command, stdout=log, stderr=log, env=variables, cwd=cwd, check=False)
            except OSError as error:
                raise SetupError(f"{command[0]}: {error}") from error
        if run.returncode:
            said = self.log.read_bytes()[start:].decode("utf-8", "replace").splitlines()
            last = [line.strip() for line in said if line.strip() and "WARNING" not in line][-_LAST_LINES:]
            raise SetupError(
                f"{Path(command[0]).name} {command[1]} failed: {' / '.join(last)} (see {self.log})"
            )

    def install(self, *requirements: str, env: Mapping[str, str] | None = None) -> None:
        """Install packages at low priority, since others may be using the machine."""
        self.run("nice", "-n", "19", self.python, "-m", "pip", "install", *requirements, env=env)

    def remove(self, *packages: str) -> None:
        """Take packages out that others have brought along; those that are not there do not matter."""
        self.run(self.python, "-m", "pip", "uninstall", "--yes", *packages)


Step = Callable[[Environment], None]
"""Builds what pip does not; its name and code are not part of the key, so ``requirements`` should pin it."""


def make_environment(
    home: Path, name: str, requirements: tuple[str, ...], step: Step | None = None
) -> Environment:
    """The environment ``home/name`` with ``requirements``; nothing is done where it is there already.

    Raises:
        SetupError: a package cannot be installed, or ``step`` failed.
    """
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    environment = Environment(home / name, home / f"{name}.log")
    key = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()
    ready = environment.directory / "ready"
    if ready.exists() and ready.read_text(encoding="ascii") == key:
        return environment
    environment.log.write_bytes(b"")
    venv.create(environment.directory, with_pip=bool(requirements))
    if requirements:
        environment.install(*requirements)
    if step is not None:
        step(environment)
    ready.write_text(key, encoding="ascii")
    return environment


def fetch_debian_library(home: Path, package: str, file: str) -> Path:
    """A shared library of a Debian package, of the system's or unpacked under ``home``; nothing is installed.

    Raises:
        SetupError: this is no Debian, or the package cannot be fetched.
    """
    directory = home.resolve() / "debian"
    for root in (Path("/usr"), directory / "usr"):
        found = next(root.glob(f"lib/*/{file}"), None)
        if found is not None:
            return found
    directory.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", package], cwd=directory, check=True, capture_output=True)
        archive = next(directory.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", archive, directory], check=True, capture_output=True)
        return next(directory.glob(f"usr/lib/*/{file}"))
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        raise SetupError(
            f"{file} of the Debian package {package}: {type(error).__name__}: {error}"
        ) from error
