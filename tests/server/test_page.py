"""The chat page as a document: headers, caching, policy."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

import pytest

from astrai_server.keys import load_keys
from fake_engine import Answer, Client, FakeEngine, ask, build_settings

DOCUMENT = (files("astrai_server") / "web" / "index.html").read_bytes()


def send(method: str = "GET", path: str = "/", **options: Any) -> Answer:
    async def use(client: Client) -> Answer:
        return await client.send(method, path, **options)

    return ask(FakeEngine(), use)


def read_policy(answer: Answer) -> dict[str, list[str]]:
    directives = (part.split() for part in answer.headers["content-security-policy"].split("; "))
    return {name: sources for name, *sources in directives}


def test_the_page_is_one_small_document_of_its_own_type() -> None:
    answer = send()
    assert answer.status == 200
    assert answer.body == DOCUMENT
    assert len(answer.body) < 60_000
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-request-id"].startswith("req_")


def test_the_page_needs_nothing_from_anywhere_else() -> None:
    text = DOCUMENT.decode()
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    loaded = re.findall(r'\b(?:src|srcset|href|action|data|poster)="([^"]*)"', markup)
    assert {address for address in loaded if not address.startswith(("#", "data:"))} == set()
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_the_scripts_and_styles_of_the_document_and_no_others() -> None:
    policy = read_policy(send())
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", DOCUMENT.decode(), re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
        assert inline
        assert policy[directive] == [f"'sha256-{digest}'" for digest in digests]
    assert policy["default-src"] == ["'none'"]
    assert policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["require-trusted-types-for"] == ["'script'"]


def test_a_head_request_gets_the_same_headers_and_no_body() -> None:
    page, head = send(), send("HEAD")
    assert (head.status, head.body) == (200, b"")
    for name in ("content-type", "content-length", "etag", "cache-control", "content-security-policy"):
        assert head.headers[name] == page.headers[name], name


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_a_browser_that_has_the_page_is_told_so(form: str) -> None:
    etag = send().headers["etag"]
    answer = send(headers={"if-none-match": form.format(etag)})
    assert (answer.status, answer.body) == (304, b"")
    assert answer.headers["etag"] == etag
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-security-policy" in answer.headers


def test_a_browser_with_another_version_gets_the_page() -> None:
    assert send(headers={"if-none-match": '"other"'}).body == DOCUMENT


def test_other_methods_are_refused_like_everywhere() -> None:
    answer = send("POST")
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.json["error"]["code"] == "method_not_allowed"


def test_the_page_needs_no_key_and_opens_nothing_else() -> None:
    keys = load_keys(build_settings(), {"ASTRAI_API_KEYS": "correct-horse-battery"})

    async def use(client: Client) -> list[int]:
        return [(await client.send("GET", path)).status for path in ("/", "/v1/models", "//", "/index.html")]

    assert ask(FakeEngine(), use, keys=keys) == [200, 401, 401, 401]


def test_the_page_is_there_while_the_model_loads() -> None:
    async def use(client: Client) -> int:
        return (await client.send("GET", "/")).status

    assert ask(None, use) == 200
