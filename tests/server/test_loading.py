from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from astrai_server import loading
from astrai_server.config import (
    ApiSettings,
    CacheSettings,
    ConfigError,
    LimitSettings,
    ServerSettings,
    Settings,
)
from astrai_server.cpu import KernelChoice
from astrai_triton import checkpoint
from astrai_triton.checkpoint import DEFAULT_MODEL
from astrai_triton.engine import InferenceEngine
from astrai_triton.engine.trace import replay
from astrai_triton.errors import UnknownModelError
from fakes import ByteTokenizer, ScriptedModel


@attrs.define
class Audience:
    lines: list[str] = attrs.field(factory=list)
    phases: list[tuple[str, int, int]] = attrs.field(factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, phase: str, done: int, total: int) -> None:
        self.phases.append((phase, done, total))


class Files:
    """An open checkpoint without files."""

    num_tensors = 7
    num_bytes = 3 << 20
    tokenizer = ByteTokenizer()
    config = ScriptedModel().config

    def __init__(self, path: Path, name: str | None) -> None:
        self.path = path
        self.name = name or path.stem

    def tensors(self, progress: Any) -> Iterator[tuple[str, torch.Tensor]]:
        progress("loading weights", self.num_bytes, self.num_bytes)
        yield "embed.weight", torch.zeros(1)


class Decoder(ScriptedModel):
    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device
        self.weights: list[str] = []

    def load_weights(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = [name for name, _ in named]


@pytest.fixture
def audience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Audience:
    """Loading without real files; the audience it talks to."""
    monkeypatch.setattr(loading, "Decoder", Decoder)
    monkeypatch.setattr(checkpoint, "resolve", lambda name, progress: tmp_path / "some.Q4_1.gguf")
    monkeypatch.setattr(checkpoint, "open_checkpoint", Files)
    return Audience()


def make_settings(**sections: Any) -> Settings:
    server = {"device": "cpu", "dtype": "float32", "param_path": "some/model", "cpu_kernels": False}
    return Settings(server=ServerSettings(**(server | sections.pop("server", {}))), **sections)


def test_the_engine_gets_every_size_from_the_settings(audience: Audience) -> None:
    settings = make_settings(
        server={"max_batch_size": 3, "max_seq_len": 100},
        cache=CacheSettings(page_size=8, n_tokens=160),
        limits=LimitSettings(max_step_tokens=64, max_queue=5),
        api=ApiSettings(model_name="mine"),
    )
    with loading.load_engine(settings, audience) as engine:
        assert (engine.max_seq_len, engine.model_name) == (100, "mine")
        assert engine.get_stats()["pages_total"] == 20
        assert engine.pool.capacity_tokens == 100
        assert engine.model.weights == ["embed.weight"]  # type: ignore[attr-defined]


def test_a_pool_of_open_size_is_computed_for_the_engine(audience: Audience) -> None:
    with loading.load_engine(make_settings(server={"max_batch_size": 2}), audience) as engine:
        assert engine.get_stats()["pages_total"] == 4096 // 16


def test_contiguous_mode_reaches_the_engine(audience: Audience) -> None:
    settings = make_settings(
        server={"max_batch_size": 2, "max_seq_len": 64}, cache=CacheSettings(mode="contiguous")
    )
    with loading.load_engine(settings, audience) as engine:
        assert engine.get_stats()["pages_total"] == 2


def test_loading_says_model_weights_and_pool(audience: Audience) -> None:
    with loading.load_engine(make_settings(), audience):
        pass
    assert [line.split("  ")[0] for line in audience.lines] == ["model", "weights", "kernels", "KV pool"]
    assert "some/model: llama, 1 layers, context 4096 tokens" in audience.lines[0]
    assert "7 tensors, 3 MiB" in audience.lines[1]
    assert "float32 on cpu" in audience.lines[1]
    assert audience.lines[2] == "kernels  torch: server.cpu_kernels is false"
    assert "32768 tokens, 2 MiB (16 requests x 2048), pages of 16, prefix cache on" in audience.lines[3]
    assert audience.phases == [("loading weights", 3 << 20, 3 << 20)]


@pytest.mark.parametrize(
    ("missing", "line"),
    [("leave", "astrai warmup builds the CPU kernels once"), ("background", "which begins now")],
)
def test_kernels_that_are_missing_are_told_about(
    audience: Audience, monkeypatch: pytest.MonkeyPatch, missing: loading.Missing, line: str
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: KernelChoice("later"))
    monkeypatch.setattr(loading, "KernelBuild", lambda engine, decoder: begun.append((engine, decoder)))
    with loading.load_engine(make_settings(), audience, missing=missing) as engine:
        assert line in audience.lines[-1]
        assert begun == ([(engine, engine.model)] if missing == "background" else [])


def test_kernels_that_are_missing_are_built_first_for_who_asks(
    audience: Audience, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = ScriptedModel()
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: KernelChoice("later"))
    monkeypatch.setattr(loading, "pack_model", lambda server, decoder: (packed, "packed"))
    with loading.load_engine(make_settings(), audience, missing="build") as engine:
        assert engine.model is packed
    assert "kernels  packed" in audience.lines


def test_graphs_that_cannot_be_captured_are_refused_before_anything_is_loaded(audience: Audience) -> None:
    with pytest.raises(
        ConfigError, match=r"server\.cuda_graphs: wanted null or false here, got true; .* cpu"
    ):
        loading.load_engine(make_settings(server={"cuda_graphs": True}), audience)
    assert audience.lines == []


def test_captured_decode_steps_are_said(audience: Audience, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool | None] = []

    class Capturing(InferenceEngine):
        def __init__(self, *args: Any, cuda_graphs: bool | None, **sizes: Any) -> None:
            super().__init__(*args, **sizes)
            given.append(cuda_graphs)
            self.graph_sizes = (1, 2, 3)

    monkeypatch.setattr(loading, "InferenceEngine", Capturing)
    with loading.load_engine(make_settings(server={"cuda_graphs": False}), audience):
        pass
    assert given == [False]
    assert audience.lines[-1] == "graphs   decode steps of up to 1, 2, 3 requests"


def test_a_model_asked_for_by_name_keeps_that_name(audience: Audience) -> None:
    with loading.load_engine(make_settings(), audience) as engine:
        assert engine.model_name == "some/model"


def test_a_model_asked_for_by_path_is_called_by_its_file(audience: Audience, tmp_path: Path) -> None:
    (tmp_path / "some.Q4_1.gguf").touch()
    assert loading.open_model(str(tmp_path / "some.Q4_1.gguf"), audience).name == "some.Q4_1"


def test_settings_that_do_not_fit_the_model_are_refused(audience: Audience) -> None:
    with pytest.raises(ConfigError, match=r"server\.max_seq_len: wanted at most 4096"):
        loading.load_engine(make_settings(server={"max_seq_len": 5000}), audience)


def test_a_model_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownModelError, match="no model 'nonsense'"):
        loading.open_model("nonsense", Audience())


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheSettings(page_size=1), "pages of 1, no prefix cache"),
        (CacheSettings(prefix_cache=False), "pages of 16, no prefix cache"),
        (CacheSettings(mode="contiguous"), "contiguous, context 4096"),
    ],
)
def test_a_pool_is_described_as_it_works(audience: Audience, cache: CacheSettings, text: str) -> None:
    with loading.load_engine(make_settings(cache=cache), audience):
        assert text in audience.lines[-1]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_path_is_local(home: Path, tmp_path: Path) -> None:
    assert loading.find_local(str(tmp_path)) == tmp_path


def test_a_known_model_is_local_once_its_file_is_there(home: Path) -> None:
    assert loading.find_local(DEFAULT_MODEL) is None
    file = home / "models" / f"{DEFAULT_MODEL}.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    assert loading.find_local(DEFAULT_MODEL.lower()) == file


@pytest.mark.parametrize("name", ["nonsense", "some/model", "./none.gguf", "a/b/c", "x" * 500])
def test_other_names_are_not_local(home: Path, name: str) -> None:
    assert loading.find_local(name) is None


def test_policy_and_overtaking_reach_the_engine(audience: Audience, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    settings = make_settings(
        server={"trace_file": str(path)}, limits=LimitSettings(policy="fcfs", max_overtaken=3)
    )
    with loading.load_engine(settings, audience):
        pass
    sizes = json.loads(path.read_text().splitlines()[0])["sizes"]
    assert (sizes["policy"], sizes["max_overtaken"]) == ("fcfs", 3)


def test_steps_are_recorded_where_the_settings_say_and_people_are_told(
    audience: Audience, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    settings = make_settings(server={"trace_file": str(path)})
    with loading.load_engine(settings, audience) as engine:
        engine.generate("abc", temperature=0, max_tokens=3)
    assert audience.lines[-1].startswith(f"WARNING  every step is recorded in {path}, with the prompts in it")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert replay(path, ScriptedModel(), ByteTokenizer()).difference is None
    # Nothing is written once the engine is shut down.
    assert path.read_text().endswith("]}\n")


def test_the_trace_of_the_run_before_is_kept(audience: Audience, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for prompt in ("first", "second", "third"):
        with loading.load_engine(make_settings(server={"trace_file": str(path)}), audience) as engine:
            engine.generate(prompt, temperature=0, max_tokens=1)

    def read_prompt(path: Path) -> bytes:
        return bytes(json.loads(path.read_text().splitlines()[1])["arrived"][0]["prompt_ids"])

    assert read_prompt(path) == b"third"
    assert read_prompt(tmp_path / "trace.jsonl.1") == b"second"


@pytest.mark.parametrize(("name", "found"), [("", "a directory"), ("none/t", "no directory")])
def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    audience: Audience, tmp_path: Path, name: str, found: str
) -> None:
    settings = make_settings(server={"trace_file": str(tmp_path / name)})
    with pytest.raises(ConfigError, match=f"server.trace_file: wanted a file in .*, got {found}"):
        loading.load_engine(settings, audience)
    assert audience.lines == []


def test_a_trace_that_may_not_be_written_is_an_error(
    audience: Audience, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(loading.os, "open", refuse)
    settings = make_settings(server={"trace_file": str(tmp_path / "t")})
    with pytest.raises(ConfigError, match=r"server.trace_file: cannot write .*: Permission denied"):
        loading.load_engine(settings, audience)
