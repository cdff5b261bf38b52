"""Weights that warmup keeps and the next start takes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from astrai_server import loading
from astrai_server.config import ServerSettings, Settings
from astrai_triton.checkpoint import resolve as resolve_model
from astrai_triton.cpu import CpuDecoder
from astrai_triton.cpu.build import cache_root
from cpu_kernels import needs_kernels

pytestmark = [
    pytest.mark.real_model,
    needs_kernels,
]


@attrs.define
class Audience:
    lines: list[str] = attrs.field(factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, phase: str, done: int, total: int) -> None:
        pass

    def first_words(self) -> list[str]:
        return [line.split()[0] for line in self.lines]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the kernels of the real one, and no weights."""
    kernels = list(cache_root().glob("kernels_*.so"))
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path))
    cache_root().mkdir()
    for path in kernels:
        shutil.copy(path, cache_root())
    return cache_root() / "weights"


@pytest.fixture
def model() -> str:
    return str(resolve_model("smollm2"))


def load(model: str, **fields: Any) -> tuple[loading.LoadedModel, Audience]:
    missing = fields.pop("missing", "leave")
    server = {"device": "cpu", "dtype": "bfloat16", "param_path": model, "cpu_kernels": True}
    audience = Audience()
    return loading.load_model(
        Settings(server=ServerSettings(**(server | fields))), audience, missing=missing
    ), audience


def weights_of(loaded: loading.LoadedModel) -> bytes:
    assert isinstance(loaded.decoder, CpuDecoder)
    return bytes(loaded.decoder.packed_weights())


def test_what_warmup_keeps_is_taken_as_it_was(model: str, store: Path) -> None:
    warm, said = load(model, missing="build")
    assert said.first_words() == ["model", "weights", "kernels", "kept"]
    kept = list(store.glob("*.packed"))
    assert said.lines[-1] == f"kept     {kept[0]}"
    taken, said = load(model)
    assert said.first_words() == ["model", "weights", "kernels"]
    assert "packed, read in" in said.lines[1]
    assert "bfloat16 on cpu" in said.lines[2]
    assert weights_of(taken) == weights_of(warm)
    # A second warmup has nothing to do.
    _, said = load(model, missing="build")
    assert said.first_words() == ["model", "weights", "kernels"]
    assert list(store.glob("*.packed")) == kept


def test_a_start_alone_keeps_nothing(model: str, store: Path) -> None:
    load(model)
    assert not store.exists()


def test_other_settings_take_nothing_of_it(model: str, store: Path) -> None:
    load(model, missing="build")
    for fields in ({"dtype": "float32"}, {"quantize": "int8"}):
        _, said = load(model, **fields)
        assert "packed, read in" not in said.lines[1]


def test_a_damaged_file_is_said_and_passed_over(model: str, store: Path) -> None:
    warm, _ = load(model, missing="build")
    (path,) = store.glob("*.packed")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    loaded, said = load(model)
    assert said.first_words() == ["model", "WARNING", "weights", "kernels"]
    assert "packed weights are not used" in said.lines[1]
    assert weights_of(loaded) == weights_of(warm)


def test_a_place_that_cannot_be_written_costs_only_the_next_start(model: str, store: Path) -> None:
    store.write_text("no directory")
    loaded, said = load(model, missing="build")
    assert "WARNING  packed weights are not kept" in said.lines[-1]
    assert isinstance(loaded.decoder, CpuDecoder)
