"""Tools, and the form of an answer, as OpenAI's clients ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from astrai_server.conversation import Tool, ToolChoice
from astrai_server.field import check_names, function_name, no_longer_than, one_of, refuse, refuse_unsupported
from astrai_server.wire import describe_value

CHOICES = ("none", "auto", "required")


@attrs.frozen(kw_only=True)
class FunctionDefinition:
    """A function the model may call."""

    name: str = attrs.field(validator=function_name)
    description: str | None = None
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    """JSON Schema of its arguments, an object; empty is any object."""
    strict: bool = False
    """The arguments follow ``parameters`` exactly; a schema that cannot be enforced is refused."""


@attrs.frozen(kw_only=True)
class ToolDefinition:
    """A tool the model may use."""

    type: str = attrs.field(validator=one_of("function"))
    function: FunctionDefinition

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    def as_tool(self) -> Tool:
        """The tool in the words of both protocols."""
        function = self.function
        return Tool(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            strict=function.strict,
        )


@attrs.frozen(kw_only=True)
class FunctionName:
    """Names one of the request's functions."""

    name: str


@attrs.frozen(kw_only=True)
class NamedToolChoice:
    """The function that has to be called."""

    type: str = attrs.field(validator=one_of("function"))
    function: FunctionName


def tool_choice(_: object, field: attrs.Attribute[Any], value: str | NamedToolChoice | None) -> None:
    """One of the words for it, or a function; None passes."""
    if isinstance(value, str) and value not in CHOICES:
        supported = f"supported: {', '.join(CHOICES)}, or an object that names a function"
        refuse_unsupported(field.name, f"{describe_value(value)} is not supported; {supported}")


def distinct_tools(_: object, field: attrs.Attribute[Any], value: Sequence[ToolDefinition]) -> None:
    """No two tools of one name, and not too many."""
    check_names(field.name, [tool.function.name for tool in value], "function", "name")


def choose_tools(
    tools: Sequence[ToolDefinition], choice: str | NamedToolChoice | None, *, is_parallel: bool
) -> ToolChoice:
    """What the model must, may or must not call.

    Raises:
        InvalidRequestError: the choice asks for a function that is not there.
    """
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in (tool.function.name for tool in tools):
            message = f"wanted one of the functions in tools, got {describe_value(name)}"
            refuse("tool_choice", message, "function", "name")
        return ToolChoice(mode="named", name=name, is_parallel=False)
    if choice == "required":
        if not tools:
            refuse("tool_choice", 'wanted at least one function in tools for "required", got none')
        return ToolChoice(mode="required", is_parallel=is_parallel)
    return ToolChoice(mode="none" if choice == "none" else "auto", is_parallel=is_parallel)


@attrs.frozen(kw_only=True)
class JsonSchemaFormat:
    """A JSON Schema that the answer follows."""

    name: str = attrs.field(default="answer", validator=no_longer_than(128))
    schema: Mapping[str, Any] = attrs.field(factory=dict)
    """Empty is any JSON value."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"description", "strict"})
    """The schema is always followed exactly."""


@attrs.frozen(kw_only=True)
class ResponseFormat:
    """The form of the answer."""

    type: str = attrs.field(validator=one_of("text", "json_object", "json_schema"))
    json_schema: JsonSchemaFormat | None = None

    def __attrs_post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("json_schema", "is required where type is json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            refuse("json_schema", f"wanted none where type is {self.type}; a schema needs type json_schema")
