"""The model: one config-driven decoder-only transformer."""

from __future__ import annotations

from astrai_triton.model.config import LayerConfig, ModelConfig, RopeConfig
from astrai_triton.model.decoder import Decoder, choose_dtype
from astrai_triton.model.rotary import RotaryEmbedding, permute_pairing

__all__ = [
    "Decoder",
    "LayerConfig",
    "ModelConfig",
    "RopeConfig",
    "RotaryEmbedding",
    "choose_dtype",
    "permute_pairing",
]
