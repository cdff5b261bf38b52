"""Text <-> token ids, chat templates and streamed detokenising, over the ``tokenizers`` package."""

from __future__ import annotations

from astrai_triton.tokenizer.chat import ChatTemplate
from astrai_triton.tokenizer.detokenize import Detokenizer
from astrai_triton.tokenizer.directory import from_directory
from astrai_triton.tokenizer.gguf import from_gguf
from astrai_triton.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "from_directory", "from_gguf"]
