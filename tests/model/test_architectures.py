"""Logits of every supported architecture against transformers, from its config.json and its weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from astrai_triton.checkpoint.hf import convert_tensors, parse_config
from astrai_triton.model import Decoder
from random_models import dense_logits, relative_error

SEQ_LEN = 32
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PHI3 = {**SIZES, "num_key_value_heads": 4, "original_max_position_embeddings": 64}
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 6}


def rope(rope_type, **fields):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 300.0, **fields}}


# Dynamic scaling: ours is the base of the longest context, theirs that of the sequence; alike at that length.
CASES = {
    "llama 2": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "tinyllama": ("Llama", {**SIZES, "num_key_value_heads": 1}),
    "smollm2": (
        "Llama",
        {
            **SIZES,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 72,
            "tie_word_embeddings": True,
        },
    ),
    "llama with biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": (
        "Llama",
        SIZES
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "linear": ("Llama", SIZES | rope("linear", factor=2.5)),
    "dynamic": ("Llama", SIZES | rope("dynamic", factor=2.0) | {"max_position_embeddings": SEQ_LEN // 2}),
    "yarn": ("Llama", SIZES | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "yarn with mscale": (
        "Llama",
        SIZES
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=0.8,
            mscale_all_dim=1.2,
            beta_fast=4.0,
            beta_slow=0.5,
            truncate=False,
        ),
    ),
    "mistral": ("Mistral", {**SIZES, "head_dim": 20, "sliding_window": 7}),
    "mistral without window": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2 with windows": (
        "Qwen2",
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 with biases": (
        "Qwen3",
        {**SIZES, "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3", PHI3),
    "phi3 partial rotary with window": (
        "Phi3",
        {**PHI3, "hidden_size": 64, "sliding_window": 9, "num_key_value_heads": 2}
        | rope("default", partial_rotary_factor=0.75),
    ),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2 without softcaps": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 scaled": (
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


def build_pair(family, fields, pairing="half"):
    """A randomly initialised transformers model, and ours with its weights."""
    name = family if family != "Gemma3" else "Gemma3Text"
    hf_config = getattr(transformers, f"{name}Config")(**fields)
    hf_config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(hf_config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            # Far from the initial ones and zeros, which hide a norm or bias that is left out.
            is_gain = parameter_name.endswith("norm.weight")
            parameter.normal_(
                1.0 if is_gain else 0.0, 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            )
    config = parse_config(hf_config.to_dict())
    ours = Decoder(config, dtype=torch.float32, device="cpu")
    ours.load_weights(convert_tensors(config, theirs.state_dict().items()))
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case):
    theirs, ours = build_pair(*CASES[case])
    token_ids = torch.randint(0, SIZES["vocab_size"], (SEQ_LEN,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(token_ids[None], use_cache=False).logits[0]
    # Both are float32; transformers also keeps angles in float32.
    assert relative_error(dense_logits(ours, token_ids), wanted) < 2e-5


def test_every_case_with_a_window_is_longer_than_its_window():
    windows = [layer.window for case in CASES.values() for layer in build_pair(*case)[1].config.layers]
    assert 0 < max(windows) < SEQ_LEN
