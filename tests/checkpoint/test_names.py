"""Tensor names of three schemes."""

from __future__ import annotations

import pytest

from astrai_triton.checkpoint.names import NormPlacement, canonical_to_hf, gguf_to_canonical, hf_to_canonical


@pytest.mark.parametrize(
    ("name", "norms", "canonical"),
    [
        ("embed_tokens.weight", "pre", "embed.weight"),
        ("lm_head.weight", "both", "lm_head.weight"),
        ("layers.12.self_attn.q_proj.bias", "pre", "layers.12.attn.q.bias"),
        ("layers.0.post_attention_layernorm.weight", "pre", "layers.0.mlp_norm.weight"),
        ("layers.0.post_attention_layernorm.weight", "both", "layers.0.post_attn_norm.weight"),
        ("layers.0.pre_feedforward_layernorm.weight", "both", "layers.0.mlp_norm.weight"),
        ("layers.0.post_feedforward_layernorm.weight", "both", "layers.0.post_mlp_norm.weight"),
        ("layers.0.pre_feedforward_layernorm.weight", "pre", None),
        ("layers.x.mlp.up_proj.weight", "pre", None),
        ("layers.0.mlp.up_proj.scale", "pre", None),
        ("layers.0.mlp.experts.0.up_proj.weight", "pre", None),
        ("weight", "pre", None),
        ("", "pre", None),
    ],
)
def test_hugging_face_names_become_canonical(name: str, norms: NormPlacement, canonical: str | None) -> None:
    assert hf_to_canonical(name, norms) == canonical


@pytest.mark.parametrize("norms", ["pre", "both"])
def test_the_way_back_to_hugging_face_is_the_inverse(norms: NormPlacement) -> None:
    for name in ("embed_tokens", "norm", "layers.7.self_attn.k_norm", "layers.7.post_attention_layernorm"):
        canonical = hf_to_canonical(f"{name}.weight", norms)
        assert canonical is not None
        assert canonical_to_hf(canonical, norms) == f"model.{name}.weight"
    assert canonical_to_hf("lm_head.weight", norms) == "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("token_embd.weight", "embed.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.3.attn_output.weight", "layers.3.attn.o.weight"),
        ("blk.3.ffn_norm.weight", "layers.3.mlp_norm.weight"),
        ("blk.3.post_ffw_norm.weight", "layers.3.post_mlp_norm.weight"),
        ("blk.3.ffn_up.weight", "layers.3.mlp.up.weight"),
        ("blk.3.ffn_gate_exps.weight", None),
        ("rope_freqs.weight", None),
    ],
)
def test_gguf_names_become_canonical(name: str, canonical: str | None) -> None:
    assert gguf_to_canonical(name, fused_gate_up=False) == canonical


def test_phi3s_ffn_up_holds_gate_and_up() -> None:
    assert gguf_to_canonical("blk.0.ffn_up.weight", fused_gate_up=True) == "layers.0.mlp.gate_up.weight"
