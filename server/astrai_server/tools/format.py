"""Which way of writing calls a model is served with."""

from __future__ import annotations

from typing import Protocol

from astrai_server.tools.parser import ToolFormat

__all__ = ["ToolFormat", "choose_tool_format"]


class ToolTemplate(Protocol):
    """What a tokenizer knows of its chat template."""

    @property
    def tool_format(self) -> ToolFormat | None: ...


def choose_tool_format(setting: ToolFormat, tokenizer: ToolTemplate) -> ToolFormat:
    """The format to read calls in.

    Args:
        setting: what the operator wants; ``auto`` leaves it to the tokenizer.
        tokenizer: its ``tool_format`` is how its chat template writes calls, None where that is unknown.
    """
    return setting if setting != "auto" else tokenizer.tool_format or "auto"
