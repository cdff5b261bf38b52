"""What an answer is made of: text, and the calls of tools in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from astrai_triton.engine.result import TokenLogprob


@attrs.frozen
class Text:
    """A piece of the answer's text."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens whose text ends in this piece, where they were asked for."""


@attrs.frozen
class CallStart:
    """The assistant begins to call a tool; comes once for each call."""

    index: int
    """Number of the call in its answer, from 0."""
    id: str
    name: str


@attrs.frozen
class CallArguments:
    """A fragment of a call's arguments; the fragments of one call, joined, are JSON text of an object."""

    index: int
    text: str


@attrs.frozen
class PromptScores:
    """Log-probabilities of the prompt's own tokens, the first being None; they come before all else."""

    logprobs: tuple[TokenLogprob | None, ...]


Piece: TypeAlias = Text | CallStart | CallArguments | PromptScores
