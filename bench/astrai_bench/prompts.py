"""Prompts of a load: random words in a wanted number of tokens, or the lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from astrai_bench.errors import BenchError

# Frequent enough to be one token, with the space before them, in the usual vocabularies.
_WORDS = """
    the of and to in is that it was for on are as with his they at be this from have or by one had not but
    what all were when we there can an your which their said if do will each about how up out them then she
    many some so these would other into has more her two like him see time could no make than first been its
    who now people my made over did down only way find use may water long little very after words called
    just where most know get through back much before go good new write our used me man too any day same
    right look think also around another came come work three word must because does part even place well
    such here take why things help put years different away again off went old number
"""
_MAX_PROBES = 6


@attrs.frozen(kw_only=True)
class Prompt:
    """What one request asks: a text, or the messages of a conversation."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None
    """Overrules the load's."""


def make_words(num_words: int, seed: str) -> Prompt:
    """``num_words`` random words; another seed shares no beginning worth caching."""
    pick = random.Random(seed)
    return Prompt(text=" ".join(pick.choices(_WORDS.split(), k=num_words)))


async def fit_words(probe: Callable[[int], Awaitable[int | None]], wanted: int) -> int:
    """Find how many words make a prompt of ``wanted`` tokens on a server.

    Args:
        probe: prompt tokens that the server counts for so many words, None where it does not tell.
        wanted: prompt tokens, the chat template's included.

    Returns:
        Words; ``wanted`` itself where the server does not tell, a word being a token.

    Raises:
        BenchError: even one word has more tokens.
    """
    num_words, nearest, per_word = wanted, (wanted, wanted), 1.0
    before: tuple[int, int] | None = None
    tried: set[int] = set()
    while num_words not in tried and len(tried) < _MAX_PROBES:
        tried.add(num_words)
        counted = await probe(num_words)
        if counted is None:
            return num_words
        excess = counted - wanted
        nearest = min(nearest, (abs(excess), num_words))
        if excess == 0:
            break
        if num_words == 1 and excess > 0:
            raise BenchError(
                f"--input-tokens: wanted at least {counted}, which one word and the server's template take, "
                f"got {wanted}; --protocol completions has no template"
            )
        if before is not None and before[0] != num_words:
            # The template's tokens fall out of the difference; a foreign vocabulary may need two for a word.
            per_word = max(1.0, (counted - before[1]) / (num_words - before[0]))
        before = (num_words, counted)
        num_words = max(1, num_words - (round(excess / per_word) or (1 if excess > 0 else -1)))
    return nearest[1]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file.

    A line is a string, or an object with ``prompt`` (a string) or ``messages`` (OpenAI's), and perhaps
    ``max_tokens``.

    Raises:
        BenchError: the file is not readable or empty, or a line is something else; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--prompts {path}: {error}") from error
    prompts = tuple(_read_line(line, f"{path}:{idx}") for idx, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise BenchError(f"--prompts {path}: wanted at least one line, got none")
    return prompts


def _read_line(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where}: wanted JSON, got {line[:60]!r}: {error}") from error
    if isinstance(value, str):
        return Prompt(text=value)
    if not isinstance(value, dict):
        raise BenchError(f"{where}: wanted a string or an object, got {line[:60]!r}")
    text, messages, max_tokens = (value.get(name) for name in ("prompt", "messages", "max_tokens"))
    conversation: tuple[dict[str, Any], ...] | None = None
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        conversation = tuple(messages)
    if isinstance(text, str) == (conversation is not None):
        raise BenchError(
            f"{where}: wanted either prompt (a string) or messages (a list of objects), got {sorted(value)}"
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise BenchError(f"{where}: max_tokens: wanted an integer >= 1, got {max_tokens!r}")
    return Prompt(
        text=text if isinstance(text, str) else None,
        messages=conversation,
        max_tokens=max_tokens,
    )


def choose_prompt(prompts: Sequence[Prompt], idx: int) -> Prompt:
    """The prompt of request ``idx``; the list begins anew at its end."""
    return prompts[idx % len(prompts)]
