"""Repositories on the Hugging Face hub, with the network kept out."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from astrai_triton.checkpoint.hub import fetch_repository
from astrai_triton.errors import FetchError


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def fake(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[dict[str, Any]]:
    """Replace the hub's download; returns the calls it will get."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_the_snapshots_directory_is_returned(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    calls = fake(monkeypatch, snapshot)
    assert fetch_repository("org/name") == snapshot
    assert calls[0]["repo_id"] == "org/name"


def test_pickles_are_never_asked_for(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    calls = fake(monkeypatch, snapshot)
    fetch_repository("org/name")
    files = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "model.pt",
        "original/consolidated.00.pth",
        "onnx/config.json",
        "consolidated.safetensors",
    ]
    wanted = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=calls[0]["allow_patterns"], ignore_patterns=calls[0]["ignore_patterns"]
    )
    assert list(wanted) == files[:4]


def test_bytes_are_reported_and_other_counts_are_not(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    calls = fake(monkeypatch, snapshot)
    told: list[tuple[str, int, int]] = []
    fetch_repository("org/name", progress=lambda *args: told.append(args))
    bar_class = calls[0]["tqdm_class"]
    with bar_class(total=100, unit="B", mininterval=0) as bytes_bar, bar_class(total=3) as files_bar:
        bytes_bar.update(40)
        bytes_bar.update(60)
        files_bar.update(3)
    assert ("fetching org/name", 40, 100) in told
    assert {phase for phase, _, _ in told} == {"fetching org/name"}
    assert told[-1] == ("fetching org/name", 100, 100)
    assert {total for _, _, total in told} == {100}


def test_without_progress_the_hub_draws_its_own_bar(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    calls = fake(monkeypatch, snapshot)
    fetch_repository("org/name")
    assert calls[0]["tqdm_class"] is None


@pytest.mark.parametrize(
    "error", [OSError("disk full"), ValueError("bad name"), ConnectionError("refused"), RuntimeError("")]
)
def test_every_failure_is_a_fetch_error_with_its_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, error)
    reason = str(error) or "RuntimeError"
    with pytest.raises(FetchError, match=f"org/name: could not fetch it from the Hugging Face hub: {reason}"):
        fetch_repository("org/name")


def test_offline_mode_is_honoured(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(snapshot))
    with pytest.raises(FetchError, match=r"org/name: .*path of a local directory or \.gguf file"):
        fetch_repository("org/name")


def test_a_missing_huggingface_hub_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=r"pip install 'astrai-triton\[serve\]'"):
        fetch_repository("org/name")


def test_the_hub_is_not_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    fake(monkeypatch, snapshot)
    imported: list[str] = []
    plain = builtins.__import__

    def watch(name: str, *args: Any) -> Any:
        imported.append(name)
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", watch)
    fetch_repository("org/name")
    assert "huggingface_hub" in imported


def test_a_repository_without_safetensors_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, tmp_path)
    with pytest.raises(FetchError, match=r"no \*\.safetensors.*GGUF"):
        fetch_repository("org/name")
