"""Which clients are tried, what each is asked to do, and what some of them have no call for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

SCENARIOS: Mapping[str, str] = {
    "models": "list of models",
    "text": "text",
    "emoji": "emoji split over tokens",
    "prefill": "continued answer",
    "stop": "stop string",
    "length": "length limit",
    "usage": "usage",
    "choices": "n=2",
    "logprobs": "logprobs",
    "completions": "legacy completions",
    "count_tokens": "token count",
    "tools": "tool call",
    "parallel_tools": "parallel tool calls",
    "tool_choice": "tool choice",
    "tool_result": "tool result",
    "json_mode": "JSON mode",
    "structured": "structured output",
    "refusals": "error before the answer",
    "fault": "error in mid-stream",
    "cancel": "cancelled stream",
    "retries": "retry after 429 and 503",
}
"""Name, which is the name of the function that runs it, -> title."""

_NOT_IN_OPENAI = dict.fromkeys(("prefill", "count_tokens"), "not in OpenAI's protocol")
_NOT_IN_ANTHROPIC = dict.fromkeys(
    ("choices", "logprobs", "completions", "json_mode"), "not in Anthropic's protocol"
)
_NO_CALL = "frameworks without a call for it"
_LANGCHAIN_GAPS = dict.fromkeys(("models",), _NO_CALL)
_LITELLM_GAPS = dict.fromkeys(("models", "count_tokens"), _NO_CALL)
_AI_SDK_GAPS = dict.fromkeys(("models", "choices", "count_tokens"), _NO_CALL)


@attrs.frozen(kw_only=True)
class Client:
    """One client in one version.

    Args:
        name: package, and what tells it from others of the same package.
        package: what is installed from PyPI or npm.
        kind: what runs it.
        program: module of ``clients.scenarios``, or file of ``js`` without its suffix.
        gaps: scenario -> why the client cannot do it.
        is_oldest: whether it stands for the oldest version that works.
    """

    name: str
    package: str
    kind: Literal["python", "js"] = "python"
    program: str
    gaps: Mapping[str, str]
    is_oldest: bool = False

    @property
    def scenarios(self) -> list[str]:
        """What it is asked to do."""
        return [name for name in SCENARIOS if name not in self.gaps]

    @property
    def environment(self) -> str:
        """Where it is installed; clients may share that."""
        if self.kind == "js":
            return "js"
        return f"{self.package}-oldest" if self.is_oldest else self.package


CLIENTS = (
    Client(
        name="openai (oldest)",
        package="openai",
        program="openai_sdk",
        is_oldest=True,
        gaps={
            **_NOT_IN_OPENAI,
            "logprobs": "came with openai 1.5",
            "structured": "came with openai 1.40",
        },
    ),
    Client(name="openai", package="openai", program="openai_sdk", gaps=_NOT_IN_OPENAI),
    Client(
        name="anthropic (oldest)",
        package="anthropic",
        program="anthropic_sdk",
        is_oldest=True,
        gaps={
            **_NOT_IN_ANTHROPIC,
            **dict.fromkeys(
                ("tools", "parallel_tools", "tool_choice", "tool_result"), "came with anthropic 0.27"
            ),
            **dict.fromkeys(("models", "count_tokens"), "came with anthropic 0.41"),
            "structured": "came with anthropic 0.77",
        },
    ),
    Client(name="anthropic", package="anthropic", program="anthropic_sdk", gaps=_NOT_IN_ANTHROPIC),
    Client(
        name="langchain-openai",
        package="langchain-openai",
        program="langchain_openai_chat",
        gaps=_LANGCHAIN_GAPS | _NOT_IN_OPENAI,
    ),
    Client(
        name="langchain-anthropic",
        package="langchain-anthropic",
        program="langchain_anthropic_chat",
        gaps=_LANGCHAIN_GAPS | _NOT_IN_ANTHROPIC,
    ),
    Client(
        name="litellm (openai)",
        package="litellm",
        program="litellm_openai",
        gaps=_LITELLM_GAPS | _NOT_IN_OPENAI,
    ),
    Client(
        name="litellm (anthropic)",
        package="litellm",
        program="litellm_anthropic",
        gaps={
            **_LITELLM_GAPS,
            **_NOT_IN_ANTHROPIC,
            "retries": "LiteLLM needs a further package to retry here",
        },
    ),
    Client(name="openai (js)", package="openai", kind="js", program="openai_sdk", gaps=_NOT_IN_OPENAI),
    Client(
        name="@anthropic-ai/sdk",
        package="@anthropic-ai/sdk",
        kind="js",
        program="anthropic_sdk",
        gaps=_NOT_IN_ANTHROPIC,
    ),
    Client(
        name="@ai-sdk/openai-compatible",
        package="@ai-sdk/openai-compatible",
        kind="js",
        program="ai_openai_compatible",
        gaps=_AI_SDK_GAPS | _NOT_IN_OPENAI | {"logprobs": _NO_CALL},
    ),
    Client(
        name="@ai-sdk/openai",
        package="@ai-sdk/openai",
        kind="js",
        program="ai_openai",
        gaps=_AI_SDK_GAPS | _NOT_IN_OPENAI,
    ),
    Client(
        name="@ai-sdk/anthropic",
        package="@ai-sdk/anthropic",
        kind="js",
        program="ai_anthropic",
        gaps=_AI_SDK_GAPS | _NOT_IN_ANTHROPIC,
    ),
)
