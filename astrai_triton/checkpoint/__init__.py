"""Files -> configuration, tensors and tokenizer: GGUF and safetensors, by path or by name."""

from __future__ import annotations

from astrai_triton.checkpoint.checkpoint import Checkpoint, open_checkpoint
from astrai_triton.checkpoint.export import export_directory
from astrai_triton.checkpoint.progress import Progress
from astrai_triton.checkpoint.resolve import DEFAULT_MODEL, known_models, resolve

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "Progress",
    "export_directory",
    "known_models",
    "open_checkpoint",
    "resolve",
]
