"""What the tools of a request mean for its answer: a grammar, and a parser of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import attrs

from astrai_server.builder import AnswerParser, check_grammar, new_id
from astrai_server.conversation import Tool, ToolChoice
from astrai_server.tools.format import ToolTemplate, choose_tool_format
from astrai_server.tools.grammar import build_tool_grammar
from astrai_server.tools.parser import ToolCallParser, ToolFormat
from astrai_server.wire import InvalidRequestError, Issue
from astrai_triton.errors import GrammarError
from astrai_triton.grammar import Grammar

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

__all__ = ["ToolFormat", "ToolPlan", "plan_tools"]


@attrs.frozen
class ToolPlan:
    """How the answer to a request with tools is constrained and read."""

    grammar: Grammar | None = None
    """None: the model writes what it likes."""
    make_parser: Callable[[], AnswerParser] | None = None
    """None: the answer is text and nothing else."""


def plan_tools(
    tools: Sequence[Tool],
    choice: ToolChoice,
    setting: ToolFormat,
    engine: InferenceEngine,
    *,
    id_prefix: str,
    answer: Grammar | None = None,
) -> ToolPlan:
    """Decide how calls are asked for and found.

    Args:
        tools: of the request.
        choice: which of them may or must be called.
        setting: how the model writes calls; "auto" asks its chat template.
        id_prefix: of the ids of calls.
        answer: a JSON Schema that the answer follows where it calls nothing.

    Raises:
        InvalidRequestError: a strict tool has a schema that cannot be enforced.
    """
    if not tools or choice.mode == "none":
        return ToolPlan(answer)
    tool_format = choose_tool_format(setting, cast(ToolTemplate, engine.tokenizer))
    names = [choice.name] if choice.name is not None else [tool.name for tool in tools]

    def make_parser() -> AnswerParser:
        return ToolCallParser(
            names, tool_format=tool_format, is_parallel=choice.is_parallel, new_id=lambda: new_id(id_prefix)
        )

    try:
        grammar = build_tool_grammar(tools, choice, tool_format, answer=answer, check=engine.compile_grammar)
    except GrammarError as error:
        raise InvalidRequestError(Issue(("tools",), str(error), is_unsupported=True)) from error
    return ToolPlan(check_grammar(engine, grammar, "tools"), make_parser)
