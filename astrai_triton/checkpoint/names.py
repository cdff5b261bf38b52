"""Tensor names: Hugging Face and GGUF on one side, the decoder's canonical names on the other.

Canonical: ``{embed,norm,lm_head}.weight``,
``layers.{i}.{attn_norm,post_attn_norm,mlp_norm,post_mlp_norm}.weight``,
``layers.{i}.attn.{q,k,v,o}.{weight,bias}``, ``layers.{i}.attn.{q_norm,k_norm}.weight`` and
``layers.{i}.mlp.{gate,up,down}.{weight,bias}``. Two more exist only until they are split (Phi-3):
``layers.{i}.attn.qkv`` and ``layers.{i}.mlp.gate_up``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

NormPlacement = Literal["pre", "both"]

_KINDS = ("weight", "bias")


@attrs.frozen
class _Scheme:
    """One side's names without their ``.weight`` or ``.bias``, mapped to the canonical ones."""

    layer_prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str]


_HF_TOP = {"embed_tokens": "embed", "norm": "norm", "lm_head": "lm_head"}
_HF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_up_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
}
_HF: Mapping[NormPlacement, _Scheme] = {
    "pre": _Scheme("layers.", _HF_TOP, {**_HF_LAYER, "post_attention_layernorm": "mlp_norm"}),
    "both": _Scheme(
        "layers.",
        _HF_TOP,
        {
            **_HF_LAYER,
            "post_attention_layernorm": "post_attn_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "post_mlp_norm",
        },
    ),
}

_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_qkv": "attn.qkv",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "post_attention_norm": "post_attn_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
_GGUF_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head"}
_GGUF = _Scheme("blk.", _GGUF_TOP, _GGUF_LAYER)
_GGUF_FUSED = _Scheme("blk.", _GGUF_TOP, {**_GGUF_LAYER, "ffn_up": "mlp.gate_up"})


def hf_to_canonical(name: str, norms: NormPlacement) -> str | None:
    """Canonical name of a Hugging Face tensor whose model prefix is off, or None for an unknown one.

    Args:
        name: e.g. ``layers.0.self_attn.q_proj.weight``.
        norms: "both" where a norm also follows attention and MLP (Gemma 2/3): it changes what
            ``post_attention_layernorm`` means.
    """
    return _translate(name, _HF[norms])


def canonical_to_hf(name: str, norms: NormPlacement) -> str:
    """The Hugging Face name, with its ``model.`` prefix, of a canonical one.

    Raises:
        KeyError: not a canonical name.
    """
    stem, _, kind = name.rpartition(".")
    scheme = _HF[norms]
    if stem.startswith("layers."):
        _, index, module = stem.split(".", 2)
        inverse = {canonical: theirs for theirs, canonical in scheme.layer.items()}
        return f"model.layers.{index}.{inverse[module]}.{kind}"
    inverse = {canonical: theirs for theirs, canonical in scheme.top.items()}
    prefix = "" if stem == "lm_head" else "model."
    return f"{prefix}{inverse[stem]}.{kind}"


def gguf_to_canonical(name: str, *, fused_gate_up: bool) -> str | None:
    """Canonical name of a GGUF tensor, or None for an unknown one.

    Args:
        name: e.g. ``blk.0.attn_q.weight``.
        fused_gate_up: ``ffn_up`` holds gate and up, one after the other (Phi-3).
    """
    return _translate(name, _GGUF_FUSED if fused_gate_up else _GGUF)


def _translate(name: str, scheme: _Scheme) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in _KINDS:
        return None
    if not stem.startswith(scheme.layer_prefix):
        module = scheme.top.get(stem)
        return None if module is None else f"{module}.{kind}"
    index, _, theirs = stem[len(scheme.layer_prefix) :].partition(".")
    module = scheme.layer.get(theirs)
    return None if module is None or not index.isdecimal() else f"layers.{index}.{module}.{kind}"
