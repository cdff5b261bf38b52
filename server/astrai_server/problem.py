"""Every failure as a client sees it: one body for all routes and readers, and its HTTP status."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
from aiohttp import web

from astrai_server.sse import encode_json
from astrai_server.wire import InvalidRequestError, MalformedBodyError
from astrai_triton.errors import (
    AstraiError,
    ChatTemplateError,
    ContextLengthError,
    EngineUnavailableError,
    PoolTooSmallError,
    QueueFullError,
    TaskError,
)

UNAVAILABLE_RETRY_S = 5.0
"""Nobody knows when a model will be loaded or another server be up."""

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class DeadlineError(Exception):
    """The request took longer than ``limits.request_timeout_s``."""


class SlowBodyError(Exception):
    """The client took longer than ``limits.body_timeout_s`` to send its body."""


class ApiKeyError(Exception):
    """The request brings no valid API key.

    Args:
        was_given: whether it brings one at all.
    """

    def __init__(self, *, was_given: bool) -> None:
        super().__init__("the API key is not known here" if was_given else "an API key is needed")
        self.was_given = was_given


class KeyLimitError(Exception):
    """An API key has as many requests as it may have at a time.

    Args:
        limit: ``limits.max_requests_per_key``.
        retry_after_s: seconds after which one of them has likely ended.
    """

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(f"this API key has {limit} requests here, as many as it may have at a time")
        self.retry_after_s = retry_after_s


class UnknownModelNameError(Exception):
    """``GET /v1/models/{id}`` for a model that is not served."""


@attrs.frozen(kw_only=True)
class Problem:
    """What a client is told about a failure. Never a traceback, never the text of an unexpected exception."""

    status: int
    message: str
    code: str
    param: str | None = None
    """Path of the field at fault."""
    detail: Any = None
    """For readers of FastAPI's errors; None is the message."""
    details: Mapping[str, Any] | None = None
    """``details`` of the ``error`` member, for clients that act on them."""
    retry_after_s: float | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)
    """Further headers of the response."""
    closes: bool = False
    """Whether the connection is of no use any more."""

    @property
    def type(self) -> str:
        """Word that both official SDKs know for this status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def as_error(self) -> dict[str, Any]:
        """The ``error`` member of the body."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return error if self.details is None else error | {"details": dict(self.details)}

    def as_body(self, request_id: str) -> dict[str, Any]:
        """The whole body."""
        return {
            "type": "error",
            "error": self.as_error(),
            "detail": self.message if self.detail is None else self.detail,
            "request_id": request_id,
        }

    def as_response(self, request_id: str) -> web.Response:
        """The HTTP response."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        headers["x-request-id"] = headers["request-id"] = request_id
        response = web.Response(
            status=self.status,
            body=encode_json(self.as_body(request_id)),
            content_type="application/json",
            headers=headers,
        )
        if self.closes:
            response.force_close()
        return response


def explain(error: BaseException, validation_status: int = 422) -> Problem:
    """Say what a client is told about ``error``.

    Args:
        error: whatever a request raised.
        validation_status: status of a body whose fields are wrong (``api.validation_status``).
    """
    if isinstance(error, InvalidRequestError):
        return _explain_issues(error, validation_status)
    if isinstance(error, web.HTTPException):
        return _explain_http(error)
    if isinstance(error, AstraiError):
        return _explain_engine(error)
    if isinstance(error, (MalformedBodyError, web.RequestPayloadError)):
        return Problem(status=400, message=str(error) or "the body could not be read", code="malformed_body")
    if isinstance(error, SlowBodyError):
        return Problem(status=408, message=str(error), code="body_timeout", closes=True)
    if isinstance(error, DeadlineError):
        return Problem(status=504, message=str(error), code="request_timeout")
    if isinstance(error, ApiKeyError):
        return _explain_key(error)
    if isinstance(error, KeyLimitError):
        return Problem(status=429, message=str(error), code="key_limit", retry_after_s=error.retry_after_s)
    if isinstance(error, UnknownModelNameError):
        return Problem(status=404, message=str(error), code="model_not_found", param="model")
    return _INTERNAL


def new_request_id() -> str:
    """A fresh id for a request that brought none."""
    return f"req_{uuid.uuid4().hex[:24]}"


def is_internal(error: BaseException) -> bool:
    """Whether ``error`` is a fault of the server, to be logged with its traceback."""
    return explain(error).status == _INTERNAL.status


_INTERNAL = Problem(
    status=500, message="internal error; the server's log has it under this request id", code="internal_error"
)


def _explain_issues(error: InvalidRequestError, validation_status: int) -> Problem:
    first = error.issues[0]
    return Problem(
        status=400 if first.is_unsupported else validation_status,
        message=str(error),
        param=first.where or None,
        code="unsupported" if first.is_unsupported else "invalid_value",
        details=first.details,
        detail=[
            {
                "loc": ["body", *issue.path],
                "msg": issue.message,
                "type": "unsupported" if issue.is_unsupported else "value_error",
            }
            for issue in error.issues
        ],
    )


def _explain_key(error: ApiKeyError) -> Problem:
    # RFC 6750: the error is only named to those who tried.
    challenge = 'Bearer realm="astrai"' + (', error="invalid_token"' if error.was_given else "")
    return Problem(
        status=401,
        message=f"{error}; send it as Authorization: Bearer <key> or as x-api-key: <key>",
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge},
    )


def _explain_http(error: web.HTTPException) -> Problem:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "the body is larger than limits.max_body_bytes of this server"
        return Problem(status=413, message=message, code="body_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return Problem(
            status=405,
            message=f"method {error.method[:16]!a} is not allowed here; allowed: {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    if error.status == 404:
        return Problem(status=404, message="there is nothing at this path", code="not_found")
    return Problem(status=error.status, message=error.reason, code="http_error")


def _explain_engine(error: AstraiError) -> Problem:
    if isinstance(error, ContextLengthError):
        return Problem(status=400, message=str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, PoolTooSmallError):
        return Problem(status=400, message=str(error), param="max_tokens", code="kv_pool_exceeded")
    if isinstance(error, ChatTemplateError):
        return Problem(status=400, message=str(error), param="messages", code="chat_template_refused")
    if isinstance(error, QueueFullError):
        return Problem(status=429, message=str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineUnavailableError):
        return Problem(
            status=503, message=str(error), code="engine_unavailable", retry_after_s=UNAVAILABLE_RETRY_S
        )
    # A task that failed says which way by its class; what caused it stays in the log.
    cause = error.__cause__
    if isinstance(cause, AstraiError):
        return _explain_engine(cause)
    if isinstance(error, TaskError) and cause is None:
        return attrs.evolve(_INTERNAL, message=str(error), code="task_failed")
    return _INTERNAL
