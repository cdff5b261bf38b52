"""How byte-level BPE vocabularies cut text into words before merging, by the names that GGUF gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
from tokenizers import Regex, normalizers, pre_tokenizers

from astrai_triton.errors import TokenizerError

# Published with the models: GPT-2's encoder.py, tiktoken's cl100k and o200k, the models' tokenizer.json.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cl100k(digits: str) -> str:
    """Words with one leading sign, numbers cut by ``digits``, punctuation with its line ends."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(digits: str, contraction: str) -> str:
    """Like cl100k, but a word ends where upper case follows lower case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@attrs.frozen
class Splitting:
    """Regular expressions, each cutting what the ones before left whole."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is that token."""
    add_bos: bool = False
    """What a file means that does not say."""
    normalizer: Callable[[], normalizers.Normalizer] | None = None

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, bytes made printable at its end."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_GPT2_SPLITTING = Splitting((_GPT2,))
_DIGITS_SPLITTING = Splitting((_DIGIT, _GPT2))
_LLAMA3_SPLITTING = Splitting((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2_SPLITTING = Splitting((_cl100k(r"\p{N}"),), normalizer=normalizers.NFC)

SPLITTINGS: Mapping[str, Splitting] = MappingProxyType(
    {
        "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "gpt-2": _GPT2_SPLITTING,
        "phi-2": _GPT2_SPLITTING,
        "smollm": _DIGITS_SPLITTING,
        "starcoder": _DIGITS_SPLITTING,
        "llama-bpe": _LLAMA3_SPLITTING,
        "llama3": _LLAMA3_SPLITTING,
        "llama-v3": _LLAMA3_SPLITTING,
        "dbrx": Splitting((_cl100k(r"\p{N}{1,3}"),)),
        "smaug-bpe": Splitting((_cl100k(r"\p{N}{1,3}"),)),
        "qwen2": _QWEN2_SPLITTING,
        "deepseek-r1-qwen": _QWEN2_SPLITTING,
        "tekken": Splitting((_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
        "gpt-4o": Splitting((_o200k(r"\p{N}{1,3}", rf"{_CONTRACTION}?"),)),
    }
)
"""``tokenizer.ggml.pre`` -> splitting; the names are llama.cpp's."""


def find_splitting(name: object) -> Splitting:
    """Splitting of that name.

    Raises:
        TokenizerError: there is none; the text names the choices.
    """
    if isinstance(name, str) and name in SPLITTINGS:
        return SPLITTINGS[name]
    raise TokenizerError(
        f"tokenizer.ggml.pre: wanted one of {', '.join(sorted(SPLITTINGS))}, got {name!r}; "
        "a wrong splitting still loads but makes the model worse, so none is assumed: "
        "use a newer GGUF or the Hugging Face directory of this model"
    )
