"""Tools, and the form of an answer, as Anthropic's clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from astrai_server.conversation import Tool
from astrai_server.conversation import ToolChoice as NeutralChoice
from astrai_server.field import check_names, function_name, one_of, refuse
from astrai_server.wire import describe_value


@attrs.frozen(kw_only=True)
class MessagesTool:
    """A tool the model may use, run by the client."""

    type: str = attrs.field(default="custom", validator=one_of("custom"))
    name: str = attrs.field(validator=function_name)
    description: str | None = None
    input_schema: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""
    strict: bool = False
    """The arguments follow ``input_schema`` exactly; a schema that cannot be enforced is refused."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )

    def as_tool(self) -> Tool:
        """The tool in the words of both protocols."""
        return Tool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


def distinct_tools(_: object, field: attrs.Attribute[Any], value: Sequence[MessagesTool]) -> None:
    """No two tools of one name, and not too many."""
    check_names(field.name, [tool.name for tool in value], "name")


@attrs.frozen(kw_only=True)
class ToolChoice:
    """Which tools the model must, may or must not use."""

    type: str = attrs.field(validator=one_of("auto", "any", "tool", "none"))
    name: str | None = None
    """Where type is tool: which."""
    disable_parallel_tool_use: bool = False

    def __attrs_post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            refuse("name", "is required where type is tool")


@attrs.frozen(kw_only=True)
class OutputFormat:
    """A JSON Schema that the answer follows."""

    type: str = attrs.field(validator=one_of("json_schema"))
    schema: Mapping[str, Any]

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"name"})


@attrs.frozen(kw_only=True)
class OutputConfig:
    """The form of the answer."""

    format: OutputFormat | None = None

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})


def choose_tools(tools: Sequence[MessagesTool], choice: ToolChoice | None) -> NeutralChoice:
    """What the model must, may or must not call.

    Raises:
        InvalidRequestError: the choice asks for a tool that is not there.
    """
    if choice is None:
        return NeutralChoice(mode="auto")
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name not in [tool.name for tool in tools]:
            message = f"wanted the name of one of the tools, got {describe_value(choice.name)}"
            refuse("tool_choice", message, "name")
        return NeutralChoice(mode="named", name=choice.name, is_parallel=False)
    if choice.type == "any":
        if not tools:
            refuse("tool_choice", "wanted at least one tool in tools for type any, got none", "type")
        return NeutralChoice(mode="required", is_parallel=is_parallel)
    return NeutralChoice(mode="none" if choice.type == "none" else "auto", is_parallel=is_parallel)
