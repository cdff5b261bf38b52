"""Tiny random models of every architecture, as transformers saves them and as llama.cpp converts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_GEMMA_NAMES = {
    **GGUF_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@attrs.frozen
class TinyModel:
    """One random model: its architecture, ``config.json`` and tensors as transformers names them."""

    arch: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, directory: Path) -> Path:
        """Write a Hugging Face directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def tiny_config(arch: str, **changes: Any) -> dict[str, Any]:
    """``config.json`` of a tiny model as the installed transformers writes it."""
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "phi3": transformers.Phi3Config,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    extra = {"sliding_window": 16} if arch in ("mistral", "gemma2", "gemma3") else {}
    if arch.startswith("gemma"):
        extra["query_pre_attn_scalar"] = SIZES["head_dim"]
    config: dict[str, Any] = classes[arch](**{**SIZES, **extra, **changes}).to_dict()
    return config


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    """Every architecture in turn."""
    return str(request.param)


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """``make_config(arch, **changes)``: see ``tiny_config``."""
    return tiny_config


@pytest.fixture
def make_model() -> Callable[..., TinyModel]:
    """``make_model(arch, **changes)``: a model with random weights, norms and biases included."""

    def make(arch: str, **changes: Any) -> TinyModel:
        import transformers

        config = tiny_config(arch, **changes)
        config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
        model = transformers.AutoModelForCausalLM.from_config(config_class.from_dict(config))
        generator = torch.Generator().manual_seed(3)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator) * 0.2
            for name, tensor in model.state_dict().items()
            if not (name == "lm_head.weight" and config["tie_word_embeddings"])
        }
        return TinyModel(arch, config, tensors)

    return make


def gguf_metadata(model: TinyModel) -> dict[str, Any]:
    """The keys llama.cpp's converter writes for a model, without their architecture prefix."""
    config = model.config
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
    }
    rope = config["rope_parameters"]
    keys["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if model.arch != "qwen2" and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if model.arch == "gemma2":
        keys["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    return keys


def gguf_tensors(model: TinyModel) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp converts them: renamed, llama's q and k interleaved, Gemma's norms + 1."""
    config = model.config
    gemma = model.arch.startswith("gemma")
    out: dict[str, np.ndarray] = {}
    for name, tensor in model.tensors.items():
        array = tensor.numpy()
        stem, _, kind = name.rpartition(".")
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        module = stem.rpartition(".")[2]
        if model.arch in ("llama", "mistral") and module in heads:
            by_head = array.reshape(heads[module], 2, config["head_dim"] // 2, *array.shape[1:])
            array = by_head.swapaxes(1, 2).reshape(array.shape)
        if gemma and module.endswith("norm"):
            array = array + 1
        if stem in GGUF_TOP_NAMES:
            out[f"{GGUF_TOP_NAMES[stem]}.{kind}"] = array
        else:
            _, _, layer, rest = stem.split(".", 3)
            names = GGUF_GEMMA_NAMES if gemma else GGUF_LAYER_NAMES
            out[f"blk.{layer}.{names[rest]}.{kind}"] = array
    return out


def write_gguf_file(
    path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, Any], general: Mapping[str, Any]
) -> Path:
    """Write a GGUF file with the ``gguf`` package. A tensor is an array, or (bytes, block format)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in [*general.items(), *((f"{arch}.{key}", value) for key, value in keys.items())]:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (np.ascontiguousarray(tensor, np.float32), None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf(tmp_path: Path, make_model: Callable[..., TinyModel]) -> Callable[..., Path]:
    """``write_gguf(arch, keys=…, tensors=…, general=…, drop=…)``: a tiny model's file, changed as told.

    ``keys`` (without the architecture prefix), ``general`` (whole keys) and ``tensors`` replace or add; a key
    or tensor named in ``drop`` is left out.
    """

    def write(
        arch: str = "llama",
        *,
        model: TinyModel | None = None,
        keys: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        general: Mapping[str, Any] | None = None,
        drop: tuple[str, ...] = (),
    ) -> Path:
        model = model or make_model(arch)
        all_keys = {**gguf_metadata(model), **(keys or {})}
        all_tensors = {**gguf_tensors(model), **(tensors or {})}
        return write_gguf_file(
            tmp_path / "model.gguf",
            "llama" if arch == "mistral" else arch,
            {key: value for key, value in all_keys.items() if key not in drop},
            {name: tensor for name, tensor in all_tensors.items() if name not in drop},
            general or {},
        )

    return write
