"""The C side's structs and functions, field by field as ``csrc/shape.h`` and ``csrc/api.cpp`` have them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Literal

ABI = 2
"""What ``astrai_abi`` of a library returns that fits this module."""

Quantize = Literal["none", "int8", "int4"]
WEIGHTS_F32, WEIGHTS_BF16, WEIGHTS_INT8, WEIGHTS_INT4 = range(4)
DTYPE_F32, DTYPE_BF16 = range(2)

HAS_QKV_BIAS, HAS_OUT_BIAS, HAS_MLP_BIAS, HAS_POST_NORMS, HAS_QK_GAIN, HAS_SINKS, HAS_HEAD = (
    1 << bit for bit in range(7)
)

PHASES = ("embed", "norm", "qkv", "rotary", "attend", "out", "gate_up", "down", "head")
"""What ``Step.phase_seconds`` counts, in order."""

ERROR_BYTES = 256


class Shape(Structure):
    """``AstraiShape``."""

    _fields_ = [
        *((name, c_int64) for name in ("n_layers", "hidden", "inner", "n_q_heads", "n_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("rotary_dim", "vocab", "n_ropes")),
        *((name, c_int32) for name in ("weights", "dtype", "activation", "adjacent", "threads", "has")),
        *((name, c_float) for name in ("norm_eps", "embed_scale", "softmax_scale", "attn_softcap")),
        ("logit_softcap", c_float),
    ]


class LayerTensors(Structure):
    """``AstraiLayer``."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")),
        *((name, c_void_p) for name in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")),
        *((name, c_void_p) for name in ("qk_gain", "sinks")),
    ]


class Step(Structure):
    """``AstraiStep``."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "batch", "num_logits")),
        *((name, c_void_p) for name in ("token_ids", "positions", "logits_rows", "req_to_token")),
        *((name, c_int64) for name in ("num_reqs", "max_ctx_len", "table_stride")),
        *((name, c_void_p) for name in ("req_pool_indices", "seq_lens", "qo_indptr", "out_cache_loc")),
        *((name, c_void_p) for name in ("k_buffer", "v_buffer")),
        ("num_slots", c_int64),
        ("freqs_cis", POINTER(c_void_p)),
        ("num_positions", POINTER(c_int64)),
        ("logits", c_void_p),
        ("phase_seconds", POINTER(c_double)),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Give the functions of ``csrc/api.cpp`` their types.

    Raises:
        AttributeError: the library lacks one.
        OSError: its structs are not these.
    """
    library.astrai_abi.restype = c_int32
    library.astrai_struct_bytes.restype, library.astrai_struct_bytes.argtypes = c_int64, [c_int32]
    library.astrai_prepare.restype = c_int32
    library.astrai_create.restype = c_void_p
    library.astrai_create.argtypes = [POINTER(Shape), POINTER(c_int64), POINTER(c_int64)]
    library.astrai_destroy.restype, library.astrai_destroy.argtypes = None, [c_void_p]
    library.astrai_pack_layer.restype = c_int32
    library.astrai_pack_layer.argtypes = [c_void_p, c_int64, POINTER(LayerTensors)]
    library.astrai_pack_head.restype = c_int32
    library.astrai_pack_head.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    library.astrai_weights.restype = c_void_p
    library.astrai_weights.argtypes = [c_void_p, POINTER(c_int64)]
    library.astrai_num_bytes.restype, library.astrai_num_bytes.argtypes = c_int64, [c_void_p]
    library.astrai_forward.restype = c_int32
    library.astrai_forward.argtypes = [c_void_p, POINTER(Step), c_char_p, c_int64]
    sizes = [ctypes.sizeof(kind) for kind in (Shape, LayerTensors, Step)]
    if library.astrai_abi() != ABI or sizes != [library.astrai_struct_bytes(i) for i in range(len(sizes))]:
        raise OSError("the structs of the library and of abi.py differ")
