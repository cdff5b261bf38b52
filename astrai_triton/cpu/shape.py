"""What the structs of ``csrc/shape.h`` say of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from astrai_triton.cpu import abi
from astrai_triton.model import ModelConfig, RopeConfig
from astrai_triton.model.layers import Layer, RmsNorm

DTYPES = {torch.float32: abi.DTYPE_F32, torch.bfloat16: abi.DTYPE_BF16}
WEIGHTS = {"int8": abi.WEIGHTS_INT8, "int4": abi.WEIGHTS_INT4}


def list_ropes(config: ModelConfig) -> list[RopeConfig]:
    """The distinct ones of the layers, in order."""
    return list(dict.fromkeys(layer.rope for layer in config.layers))


def describe_shape(
    config: ModelConfig, dtype: torch.dtype, quantize: abi.Quantize, embed_scale: float, threads: int
) -> abi.Shape:
    """What the kernels have to know of a model, but for its layers' windows and ropes."""
    scale = config.head_dim**-0.5 if config.softmax_scale is None else config.softmax_scale
    parts = {
        abi.HAS_QKV_BIAS: config.qkv_bias,
        abi.HAS_OUT_BIAS: config.o_bias,
        abi.HAS_MLP_BIAS: config.mlp_bias,
        abi.HAS_POST_NORMS: config.post_norms,
        abi.HAS_QK_GAIN: config.qk_norm,
        abi.HAS_SINKS: config.sinks,
        abi.HAS_HEAD: not config.tie_embeddings,
    }
    return abi.Shape(
        n_layers=config.n_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        n_q_heads=config.n_q_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.layers[0].rope.rotary_dim,
        vocab=config.vocab_size,
        n_ropes=len(list_ropes(config)),
        # Weights of the model's own dtype have its number.
        weights=WEIGHTS.get(quantize, DTYPES[dtype]),
        dtype=DTYPES[dtype],
        activation=0 if config.activation == "silu" else 1,
        adjacent=config.pairing == "adjacent",
        threads=threads,
        has=sum(bit for bit, is_there in parts.items() if is_there),
        norm_eps=config.norm_eps,
        embed_scale=embed_scale,
        softmax_scale=scale,
        attn_softcap=config.attn_softcap,
        logit_softcap=config.logit_softcap,
    )


def describe_layer(dtype: torch.dtype, layer: Layer) -> tuple[abi.LayerTensors, list[Tensor]]:
    """Where a layer's tensors are, matrices in ``dtype``, and those that must live until they are packed."""
    attn, mlp, kept = layer.attn, layer.mlp, []

    def place(tensor: Tensor | None, wanted: torch.dtype = torch.float32) -> int | None:
        if tensor is None:
            return None
        kept.append(tensor.detach().to(wanted).contiguous())
        return kept[-1].data_ptr()

    def weight_of(norm: RmsNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    tensors = abi.LayerTensors(
        qkv=place(attn.qkv_weight, dtype),
        o=place(attn.o_weight, dtype),
        gate_up=place(mlp.gate_up_weight, dtype),
        down=place(mlp.down_weight, dtype),
        qkv_bias=place(attn.qkv_bias),
        o_bias=place(attn.o_bias),
        gate_up_bias=place(mlp.gate_up_bias),
        down_bias=place(mlp.down_bias),
        attn_norm=place(layer.attn_norm.weight),
        post_attn_norm=place(weight_of(layer.post_attn_norm)),
        mlp_norm=place(layer.mlp_norm.weight),
        post_mlp_norm=place(weight_of(layer.post_mlp_norm)),
        qk_gain=place(attn.qk_gain),
        sinks=place(attn.sinks),
    )
    return tensors, kept
