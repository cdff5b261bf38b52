"""What the scripted model answers: the last message says it.

===================  =============================================================================
``say:TEXT``         TEXT, to the letter
``call:NAME JSON``   a tool call
``calls:TEXT``       TEXT, whose lines may be calls
``unless forced:X``  "No.", but X where a grammar leaves no other way
``slow:N``           N letters, with a pause after each
``fault:N``          N letters, then the task fails
``retry:ID``         "done", once the request was refused twice
anything else        what stands between ``##`` and ``##`` in the turns after the first question
===================  =============================================================================

The last line proves that tool calls and their results were rendered into the prompt, however that was done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import attrs

from fakes import EOS

END = b"<assistant>"
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
RELUCTANT = b"No."

_TURN = re.compile(rb"<(?:system|user|tool)>")
_DIRECTIVE = re.compile(rb"(unless forced:)?(say|calls?|slow|fault|retry):")
_MARK = re.compile(rb"##(.*?)##")
_SPACE = re.compile(rb"\s+")


@attrs.frozen(kw_only=True)
class Plan:
    """One answer."""

    text: bytes
    is_reluctant: bool = False
    """Rather ends with ``RELUCTANT``."""
    fault_after: int | None = None
    """Bytes after which the task fails."""
    is_slow: bool = False
    refuses: bool = False
    """Whether the first requests are turned away."""


def read_context(context: bytes) -> tuple[Plan, bytes]:
    """The plan for a conversation, and what was said of it so far.

    Args:
        context: prompt and answer; the prompt ends with ``END``, or with what the assistant has begun to say.
    """
    # The Vercel AI SDK has its own way to write a conversation as a raw prompt.
    context = context.replace(b"user:\n", b"<user>").replace(b"\n\nassistant:\n", END)
    prompt, _, said = context.rpartition(END)
    return plan_answer(prompt), said


def plan_answer(prompt: bytes) -> Plan:
    """The answer to a conversation without its final ``END``."""
    turns = list(_TURN.finditer(prompt))
    last = prompt[turns[-1].end() :] if turns else prompt
    directive = _DIRECTIVE.match(last)
    if directive is None:
        _, _, later = prompt.partition(END)
        return Plan(text=b" ".join(_MARK.findall(later)))
    is_reluctant, verb = directive[1] is not None, directive[2]
    rest = last[directive.end() :]
    if verb == b"call":
        return Plan(text=_write_call(rest), is_reluctant=is_reluctant)
    if verb == b"calls":
        lines = (_write_call(line[5:]) if line.startswith(b"call:") else line for line in rest.splitlines())
        return Plan(text=b"\n".join(lines), is_reluctant=is_reluctant)
    if verb == b"slow":
        return Plan(text=_spell(int(rest)), is_slow=True)
    if verb == b"fault":
        return Plan(text=_spell(int(rest)), fault_after=int(rest))
    if verb == b"retry":
        return Plan(text=b"done", refuses=True)
    return Plan(text=rest, is_reluctant=is_reluctant)


def rank_tokens(plan: Plan, said: bytes) -> list[int]:
    """What the model likes to say next, most of all first; all else it likes the same.

    A grammar may want other white space than ``plan.text`` has, or none: the plan then goes on at the same
    letter.
    """
    return list(dict.fromkeys(_propose(plan, said)))


def _propose(plan: Plan, said: bytes) -> Iterator[int]:
    if plan.is_reluctant and RELUCTANT.startswith(said):
        yield _next_byte(RELUCTANT, said)
    if plan.text.startswith(said):
        yield _next_byte(plan.text, said)
    dense_text, dense_said = _SPACE.sub(b"", plan.text), _SPACE.sub(b"", said)
    if dense_text.startswith(dense_said):
        yield _next_byte(dense_text, dense_said)
        yield from b" \n"
    else:
        yield EOS


def _next_byte(text: bytes, said: bytes) -> int:
    return text[len(said)] if len(said) < len(text) else EOS


def _spell(count: int) -> bytes:
    return (LETTERS * (count // len(LETTERS) + 1))[:count]


def _write_call(call_text: bytes) -> bytes:
    """``NAME JSON`` as models of the Hermes and Qwen families write it."""
    name, _, arguments = call_text.decode().partition(" ")
    call = json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>".encode()
