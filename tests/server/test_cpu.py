"""When a model runs in the CPU kernels, and what people are told."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_server import cpu
from astrai_server.config import ConfigError, ServerSettings, Settings
from astrai_server.cpu import KernelBuild, KernelChoice, choose_kernels, pack_model, prefers_bfloat16
from astrai_triton import ATTN_BACKEND, attn_backend
from astrai_triton.cpu import CpuDecoder, rows
from astrai_triton.cpu.rows import find_row_kernels
from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.model import Decoder
from cpu_kernels import needs_kernels
from fakes import ByteTokenizer
from random_models import random_decoder, small_config


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(small_config(vocab_size=300, max_seq_len=256))


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine on which kernels can be had; ``built`` and ``reason`` may be changed."""
    machine: dict[str, Any] = {"built": False, "reason": None}
    monkeypatch.setattr(cpu, "is_built", lambda: machine["built"])
    monkeypatch.setattr(cpu, "why_not_config", lambda config, dtype, quantize: machine["reason"])
    monkeypatch.setattr(cpu, "why_not_build", lambda: machine["reason"])
    return machine


def choose(server: ServerSettings, decoder: Decoder) -> KernelChoice:
    return choose_kernels(server, decoder.device, decoder.dtype, decoder.config)


def serve_on(decoder: Decoder, **sizes: Any) -> InferenceEngine:
    sizes = {"max_batch_size": 2, "max_seq_len": 128, "n_tokens": 512} | sizes
    return InferenceEngine(decoder, ByteTokenizer(), **sizes)


def test_kernels_that_are_built_are_used_at_once(decoder: Decoder, possible: dict[str, Any]) -> None:
    assert choose(ServerSettings(), decoder).when == "later"
    possible["built"] = True
    assert choose(ServerSettings(), decoder).when == "now"


@pytest.mark.parametrize("fields", [{"cpu_kernels": True}, {"quantize": "int8"}, {"trace_file": "trace"}])
def test_nothing_runs_without_kernels_first_that_is_said_to_have_them(
    decoder: Decoder, possible: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert choose(ServerSettings(**fields), decoder).when == "now"


def test_kernels_that_cannot_be_had_are_named_with_the_reason(
    decoder: Decoder, possible: dict[str, Any]
) -> None:
    possible["reason"] = "no compiler"
    choice = choose(ServerSettings(), decoder)
    assert (choice.when, choice.reason) == ("never", "no compiler")
    with pytest.raises(
        ConfigError, match=r"server\.cpu_kernels: wanted null or false here, got true; no comp"
    ):
        choose(ServerSettings(cpu_kernels=True), decoder)
    with pytest.raises(ConfigError, match=r"server\.quantize: wanted none here, got int8; no compiler"):
        choose(ServerSettings(quantize="int8"), decoder)


def test_kernels_that_are_switched_off_are_not_used(decoder: Decoder, possible: dict[str, Any]) -> None:
    possible["built"] = True
    choice = choose(ServerSettings(cpu_kernels=False), decoder)
    assert (choice.when, choice.reason) == ("never", "server.cpu_kernels is false")
    assert not prefers_bfloat16(ServerSettings(cpu_kernels=False))


def test_an_attention_backend_chosen_by_name_is_kept(decoder: Decoder, possible: dict[str, Any]) -> None:
    possible["built"] = True
    with attn_backend(ATTN_BACKEND.TORCH_NATIVE):
        choice = choose(ServerSettings(), decoder)
        assert not prefers_bfloat16(ServerSettings())
    assert choice.when == "never"
    assert "torch_native was chosen by name" in choice.reason


def test_eight_bits_without_kernels_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"server\.quantize: wanted none without the CPU kernels, got int8"):
        Settings(server=ServerSettings(quantize="int8", cpu_kernels=False))


def test_a_model_on_a_gpu_has_none(decoder: Decoder, possible: dict[str, Any]) -> None:
    choice = choose_kernels(ServerSettings(), torch.device("cuda:0"), torch.bfloat16, decoder.config)
    assert (choice.when, choice.reason) == (
        "never",
        "the CPU kernels need the model on the CPU, it is on cuda:0",
    )
    with pytest.raises(
        ConfigError, match=r"server\.quantize: wanted none here, got int8; .* it is on cuda:0"
    ):
        choose_kernels(
            ServerSettings(quantize="int8"), torch.device("cuda:0"), torch.bfloat16, decoder.config
        )


@needs_kernels
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_a_model_is_packed_and_its_first_form_freed(decoder: Decoder, quantize: Any) -> None:
    model, line = pack_model(ServerSettings(quantize=quantize), decoder)
    assert isinstance(model, CpuDecoder)
    assert model.quantize == quantize
    assert line.startswith("CPU kernels for ")
    assert ("weights as" in line) == (quantize != "none")
    assert quantize == "none" or f"weights as {quantize}" in line
    assert all(parameter.numel() == 0 for parameter in decoder.layers.parameters())


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses everything, and a cache without kernels."""
    compiler = tmp_path / "cxx"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit\necho 'error: no such thing' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))


@needs_kernels
@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_fails_leaves_torch_unless_kernels_were_asked_for(decoder: Decoder) -> None:
    model, line = pack_model(ServerSettings(trace_file="trace"), decoder)
    assert model is decoder
    assert line.startswith("torch: the CPU kernels for ")
    assert "no such thing" in line
    for fields, name in (({"cpu_kernels": True}, "cpu_kernels"), ({"quantize": "int8"}, "quantize")):
        with pytest.raises(ConfigError, match=rf"server\.{name}: the CPU kernels for"):
            pack_model(ServerSettings(**fields), decoder)


@needs_kernels
def test_an_engine_answers_before_its_kernels_are_built_and_goes_on_with_them(
    decoder: Decoder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with serve_on(decoder) as engine:
        expected = engine.generate("a prompt", params=params)
    # As it is where they were not built when the first row was sampled.
    monkeypatch.setattr(rows, "is_built", lambda: False)
    find_row_kernels.cache_clear()
    assert find_row_kernels() is None
    monkeypatch.undo()
    with serve_on(decoder) as engine, caplog.at_level("INFO", logger="astrai.server"):
        handle = engine.submit(list(b"a prompt"), params)
        build = KernelBuild(engine, decoder)
        assert "".join(event.text for event in handle.iter_events()) == expected
        assert build.wait(120)
        assert isinstance(engine.model, CpuDecoder)
        assert find_row_kernels() is not None
        assert engine.generate("a prompt", params=params) == expected
    assert "steps run in the CPU kernels from now on" in caplog.text


@needs_kernels
@pytest.mark.usefixtures("broken_compiler")
def test_an_engine_whose_kernels_do_not_build_stays_with_torch(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_on(decoder) as engine:
        assert KernelBuild(engine, decoder).wait(120)
        assert engine.model is decoder
        assert engine.generate("a", temperature=0, max_tokens=3)
    assert "steps stay with torch: the CPU kernels for" in caplog.text


@needs_kernels
def test_a_build_ends_with_its_engine(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 600\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))
    engine = serve_on(decoder)
    build = KernelBuild(engine, decoder)
    assert not build.wait(0.2)
    engine.shutdown()
    del engine
    gc.collect()
    assert build.wait(60)
    assert "torch" not in caplog.text


@needs_kernels
def test_a_build_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo $$ > {tmp_path}/pid; exec sleep 600; }}\n'
    )
    compiler.chmod(0o755)
    code = (
        "import sys, time, pathlib\n"
        "from random_models import random_decoder, small_config\n"
        "from astrai_server.cpu import KernelBuild\n"
        "class Engine: pass\n"
        "engine = Engine()\n"
        "KernelBuild(engine, random_decoder(small_config()))\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
    )
    env = {**os.environ, "CXX": str(compiler), "ASTRAI_HOME": str(tmp_path / "home")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pid")], env=env, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
