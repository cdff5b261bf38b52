"""Checkpoint -> Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors import safe_open

from astrai_triton.checkpoint import export_directory, open_checkpoint
from astrai_triton.checkpoint.hf import parse_config
from astrai_triton.checkpoint.hf_export import to_hf_config
from astrai_triton.errors import UnsupportedModelError

Make = Callable[..., Any]
Write = Callable[..., Path]


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_the_tensors_are_those_transformers_would_save(
    form: str, arch: str, make_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    model = make_model(arch)
    path = write_gguf(arch, model=model) if form == "gguf" else model.save(tmp_path / "hf")
    got = stored(export_directory(open_checkpoint(path), tmp_path / "out"))
    assert got.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            # Adding one and taking it away rounds once.
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=2**-24)
        else:
            assert torch.equal(got[name], tensor), name


def test_the_configuration_survives(arch: str, make_model: Make, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model(arch).save(tmp_path / "hf"))
    again = open_checkpoint(export_directory(checkpoint, tmp_path / "out"))
    assert again.config == checkpoint.config


def test_transformers_reads_the_configuration_the_same_way(arch: str, make_config: Make) -> None:
    import transformers

    config = parse_config(make_config(arch))
    written = to_hf_config(config)
    theirs = transformers.AutoConfig.for_model(**written)
    assert parse_config(theirs.to_dict()) == config


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_every_rope_scaling_survives(scaling: dict[str, Any], make_config: Make) -> None:
    written = {**make_config("llama"), "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 5e5}
    config = parse_config(written)
    assert config.layers[0].rope.scaling == scaling["rope_type"]
    assert parse_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 20}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("gemma3", {"num_hidden_layers": 13, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma2", {"attn_logit_softcapping": None, "query_pre_attn_scalar": 144}),
    ],
)
def test_options_of_the_architectures_survive(arch: str, changes: dict[str, Any], make_config: Make) -> None:
    config = parse_config(make_config(arch, **changes))
    assert config != parse_config(make_config(arch))
    assert parse_config(to_hf_config(config)) == config


def llama3_divisors(factor: float, base: float, rotary_dim: int) -> list[float]:
    """What llama.cpp's converter stores for Llama 3.1 and later (low 1, high 4, trained at 8192)."""
    divisors = []
    for i in range(rotary_dim // 2):
        wavelength = 2 * np.pi * base ** (2 * i / rotary_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_stored_divisors_become_parameters_again(factor: float, make_config: Make) -> None:
    config = parse_config(
        {**make_config("llama"), "head_dim": 64, "rope_parameters": None, "rope_theta": 5e5}
    )
    rope = attrs.evolve(config.layers[0].rope, freq_factors=tuple(llama3_divisors(factor, 5e5, 64)))
    config = attrs.evolve(config, layers=tuple(attrs.evolve(layer, rope=rope) for layer in config.layers))
    assert to_hf_config(config)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_of_no_known_scaling_are_refused(write_gguf: Write, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tensors={"rope_freqs.weight": np.array([1.0, 3.0, 2.0, 8.0])}))
    with pytest.raises(UnsupportedModelError, match="rope_freqs: divisor 1 is 3"):
        export_directory(checkpoint, tmp_path / "out")


def test_a_llama_file_with_a_window_is_written_as_mistral(write_gguf: Write) -> None:
    checkpoint = open_checkpoint(write_gguf(keys={"attention.sliding_window": 16}))
    written = to_hf_config(checkpoint.config)
    assert (written["model_type"], written["sliding_window"]) == ("mistral", 16)


def test_biases_no_config_json_can_say_are_refused(write_gguf: Write) -> None:
    checkpoint = open_checkpoint(write_gguf(tensors={"blk.0.attn_q.bias": np.zeros(32)}))
    with pytest.raises(UnsupportedModelError, match="biases"):
        to_hf_config(checkpoint.config)


def test_the_dtype_asked_for_is_stored_and_declared(make_model: Make, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model("llama").save(tmp_path / "hf"))
    directory = export_directory(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in stored(directory).values()} == {torch.bfloat16}
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_stay_below_the_limit_and_are_indexed(make_model: Make, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_model("llama").save(tmp_path / "hf"))
    directory = export_directory(checkpoint, tmp_path / "out", max_shard_bytes=10_000)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 12_000 for file in files)
    again = dict(open_checkpoint(directory).tensors())
    assert all(torch.equal(again[name], tensor) for name, tensor in checkpoint.tensors())


def test_tokenizer_files_are_copied(make_model: Make, tmp_path: Path) -> None:
    source = make_model("llama").save(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    directory = export_directory(open_checkpoint(source), tmp_path / "out")
    assert (directory / "tokenizer.json").read_text() == "{}"
    assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"


def test_transformers_loads_the_directory(arch: str, make_model: Make, tmp_path: Path) -> None:
    import transformers

    model = make_model(arch)
    directory = export_directory(open_checkpoint(model.save(tmp_path / "hf")), tmp_path / "out")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = loaded.state_dict()
    for name, tensor in model.tensors.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=2**-24)
