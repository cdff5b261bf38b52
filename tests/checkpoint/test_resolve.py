"""A name -> files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from astrai_triton.checkpoint import DEFAULT_MODEL, resolve
from astrai_triton.errors import UnknownModelError

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an empty working directory, and no process to fetch with."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def fetched(home: Path) -> Path:
    """The default model as an earlier fetch left it; only its size is real."""
    path = home / "models" / SMOLLM2
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(98_362_432)
    stamp = path.with_name(SMOLLM2 + ".sha256")
    stamp.write_text("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53\n")
    return path


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2", "SmolLM2", "smollm2-135m-instruct"])
def test_the_default_model_has_a_name_and_an_alias_in_any_case(name: str, fetched: Path) -> None:
    assert resolve(name) == fetched


def test_the_default_is_a_known_model(fetched: Path) -> None:
    assert resolve(DEFAULT_MODEL) == fetched


def test_a_model_that_is_not_here_is_fetched() -> None:
    with pytest.raises(AssertionError, match="a process was started"):
        resolve("smollm2")


def test_the_cache_is_below_the_home_directory_by_default(
    fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASTRAI_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user" / ".cache").mkdir(parents=True)
    fetched.parent.parent.rename(tmp_path / "user" / ".cache" / "astrai")
    assert resolve("smollm2") == tmp_path / "user" / ".cache" / "astrai" / "models" / SMOLLM2


def test_a_directory_and_a_gguf_file_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "work" / "my-model").mkdir()
    (tmp_path / "work" / "a.GGUF").write_bytes(b"")
    assert resolve("my-model") == Path("my-model")
    assert resolve(str(tmp_path / "work" / "a.GGUF")) == tmp_path / "work" / "a.GGUF"


def test_a_directory_wins_over_a_repository_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "work" / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


def test_an_organisation_and_a_name_are_a_hub_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def fetch(name: str, **options: Any) -> Path:
        asked.append(name)
        return tmp_path

    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == tmp_path
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "a/b/c",
        "./org/name",
        "models/x.gguf",
        "/absent",
        "-x/y",
        "",
        "org/",
        "a b/c",
        "x" * 5000,
        "a\0b",
    ],
)
def test_anything_else_is_unknown_and_the_choices_are_listed(name: str) -> None:
    with pytest.raises(
        UnknownModelError, match=r"choices: SmolLM2-135M-Instruct, smollm2, a local directory, .*org/name"
    ):
        resolve(name)


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2-135M-Instuct", "smollm"])
def test_a_near_miss_is_answered_with_the_name_that_was_meant(name: str) -> None:
    with pytest.raises(UnknownModelError, match="did you mean 'SmolLM2-135M-Instruct'"):
        resolve(name)


def test_a_file_of_another_kind_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "work" / "model.bin").write_bytes(b"")
    with pytest.raises(UnknownModelError, match=r"wanted a \.gguf file or a directory"):
        resolve("model.bin")
