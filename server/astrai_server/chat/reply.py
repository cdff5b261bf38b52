"""What servers send -> what a chat needs of it. Lenient with everything that a chat can do without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs

from astrai_server.chat.control import make_line
from astrai_server.chat.errors import ChatError, MalformedFrameError


@attrs.frozen
class Usage:
    """Tokens of one answer, as the server counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Those of the prompt that were in the cache; None if the server does not say."""


@attrs.frozen(kw_only=True)
class Delta:
    """What one frame adds to the answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


def read_frame(data: str) -> Delta:
    """Read a frame of a stream, or the body of an answer that is none.

    Raises:
        MalformedFrameError: it is not JSON or not an object.
        ChatError: it is an error.
    """
    try:
        frame = json.loads(data)
    # RecursionError: no depth is too much for a server that means harm.
    except (ValueError, RecursionError) as error:
        raise MalformedFrameError(
            f"the server sent a frame that is not JSON: {make_line(data, 80)}"
        ) from error
    if not isinstance(frame, dict):
        raise MalformedFrameError(f"the server sent a frame that is not an object: {make_line(data, 80)}")
    message = find_error(frame)
    if message is not None:
        raise ChatError(f"the server reports an error: {message}")
    choice = _first(frame.get("choices"))
    # Whole answers have a message where streams have a delta; one frame may carry null for either.
    said = _as_dict(choice.get("delta")) or _as_dict(choice.get("message"))
    finish = choice.get("finish_reason")
    return Delta(
        text=_join_text(said.get("content")) or _join_text(said.get("refusal")),
        reasoning=_join_text(said.get("reasoning_content")) or _join_text(said.get("reasoning")),
        finish_reason=finish if isinstance(finish, str) else None,
        # Without an object of its own the counts may be in the frame itself.
        usage=_read_usage(_as_dict(frame.get("usage")) or frame),
    )


def read_models(body: bytes) -> list[str]:
    """Names in the answer to ``GET /models``.

    Raises:
        ChatError: the body is no list of models.
    """
    try:
        listed = json.loads(body)["data"]
        names = [model["id"] for model in listed]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ChatError("the server sent no list of models; name one with --model") from error
    return [name for name in names if isinstance(name, str)]


def find_error(frame: dict[str, Any]) -> str | None:
    """The message of an error on one line; None if ``frame`` is none."""
    error = frame.get("error")
    if not error and frame.get("object") != "error":
        return None
    parts = error if isinstance(error, dict) else frame
    for candidate in (parts.get("message"), error, parts.get("code"), parts.get("type")):
        if isinstance(candidate, str) and candidate:
            return make_line(candidate)
    return make_line(json.dumps(error))


def describe_body(body: bytes) -> str:
    """The cause in the body of a response that failed, on one line; "" if there is none for people."""
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return "" if text.lstrip().startswith("<") else make_line(text)
    if not isinstance(parsed, dict):
        return make_line(text)
    message = find_error(parsed)
    if message is None:
        known = [parsed.get("message"), parsed.get("detail"), *_list_details(parsed.get("detail"))]
        message = next((make_line(item) for item in known if isinstance(item, str) and item), "")
    return message


def _list_details(detail: Any) -> Iterator[Any]:
    """Messages of FastAPI's list of errors."""
    if isinstance(detail, list):
        yield from (_as_dict(item).get("msg") for item in detail)


def _first(items: Any) -> dict[str, Any]:
    return _as_dict(items[0]) if isinstance(items, list) and items else {}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _join_text(content: Any) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_join_text(_as_dict(part).get("text")) for part in content)
    return ""


def _read_usage(counts: dict[str, Any]) -> Usage | None:
    prompt = _as_count(counts.get("prompt_tokens"))
    completion = _as_count(counts.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    cached = _as_dict(counts.get("prompt_tokens_details")).get("cached_tokens")
    return Usage(prompt, completion, _as_count(cached))


def _as_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
