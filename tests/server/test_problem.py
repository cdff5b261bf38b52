"""What clients are told about failures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from astrai_server.problem import (
    DeadlineError,
    Problem,
    SlowBodyError,
    UnknownModelNameError,
    explain,
    is_internal,
)
from astrai_server.wire import InvalidRequestError, Issue, MalformedBodyError
from astrai_triton.errors import (
    ChatTemplateError,
    ContextLengthError,
    EngineUnavailableError,
    NonFiniteLogitsError,
    OutOfPagesError,
    PoolTooSmallError,
    QueueFullError,
    TaskError,
)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (MalformedBodyError("x"), 400, "invalid_request_error", "malformed_body"),
        (InvalidRequestError(Issue(("a",), "x")), 422, "invalid_request_error", "invalid_value"),
        (InvalidRequestError(Issue(("a",), "x", True)), 400, "invalid_request_error", "unsupported"),
        (ContextLengthError(9, 8), 400, "invalid_request_error", "context_length_exceeded"),
        (PoolTooSmallError(9, 8), 400, "invalid_request_error", "kv_pool_exceeded"),
        (ChatTemplateError("x"), 400, "invalid_request_error", "chat_template_refused"),
        (QueueFullError(3, 2.5), 429, "rate_limit_error", "queue_full"),
        (EngineUnavailableError("x"), 503, "overloaded_error", "engine_unavailable"),
        (SlowBodyError("x"), 408, "invalid_request_error", "body_timeout"),
        (DeadlineError("x"), 504, "timeout_error", "request_timeout"),
        (UnknownModelNameError("x"), 404, "not_found_error", "model_not_found"),
        (web.HTTPNotFound(), 404, "not_found_error", "not_found"),
        (web.HTTPMethodNotAllowed("PUT", ["POST"]), 405, "invalid_request_error", "method_not_allowed"),
        (web.HTTPRequestEntityTooLarge(1, 2), 413, "request_too_large", "body_too_large"),
        (web.HTTPExpectationFailed(), 417, "invalid_request_error", "http_error"),
        (web.RequestPayloadError("x"), 400, "invalid_request_error", "malformed_body"),
        (NonFiniteLogitsError("x"), 500, "api_error", "task_failed"),
        (OutOfPagesError(1, 0), 500, "api_error", "internal_error"),
        (RuntimeError("x"), 500, "api_error", "internal_error"),
        (ValueError("x"), 500, "api_error", "internal_error"),
        (caused(TaskError("x"), EngineUnavailableError("x")), 503, "overloaded_error", "engine_unavailable"),
        (caused(TaskError("x"), RuntimeError("x")), 500, "api_error", "internal_error"),
    ],
)
def test_every_error_has_a_status_and_a_type_the_sdks_know(
    error: BaseException, status: int, type_: str, code: str
) -> None:
    problem = explain(error)
    assert (problem.status, problem.type, problem.code) == (status, type_, code)
    assert is_internal(error) == (status == 500)


def test_the_validation_status_can_be_400() -> None:
    assert explain(InvalidRequestError(Issue(("a",), "x")), 400).status == 400


def test_the_text_of_an_unexpected_error_stays_inside() -> None:
    secret = RuntimeError("/srv/models/secret")
    for error in (secret, caused(TaskError("task 1 failed"), secret)):
        assert "secret" not in json.dumps(explain(error).as_body("r"))


def test_the_context_length_is_in_the_message() -> None:
    assert "maximum context length is 8 tokens" in explain(ContextLengthError(9, 8)).message


def test_the_first_wrong_field_is_the_param_and_all_are_in_the_detail() -> None:
    problem = explain(InvalidRequestError(Issue(("a", 0, "b"), "is wrong"), Issue(("c",), "too")))
    assert problem.param == "a[0].b"
    assert [item["loc"] for item in problem.detail] == [["body", "a", 0, "b"], ["body", "c"]]


def test_the_body_serves_all_readers() -> None:
    body = Problem(status=503, message="m", code="c").as_body("req_1")
    assert body == {
        "type": "error",
        "error": {"message": "m", "type": "overloaded_error", "param": None, "code": "c"},
        "detail": "m",
        "request_id": "req_1",
    }


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (2.1, "3"), (None, None)])
def test_retry_after_is_in_whole_seconds(seconds: Any, header: str | None) -> None:
    response = Problem(status=429, message="m", code="c", retry_after_s=seconds).as_response("r")
    assert response.headers.get("Retry-After") == header
    assert response.headers["x-request-id"] == response.headers["request-id"] == "r"
