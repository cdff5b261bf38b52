"""The chat page at ``/``: one static document that talks to this server alone."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import attrs
from aiohttp import ETag, hdrs, web

PATH = "/"

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@attrs.frozen
class Page:
    """A document as it is sent: every inline script and style is allowed by its hash, and nothing else is."""

    body: bytes
    etag: str
    """Strong: a digest of the body, without the quotes."""
    policy: str
    """``Content-Security-Policy``."""


def add_page(app: web.Application) -> None:
    """Serve the page at ``PATH``, to GET and HEAD.

    The document holds no secret and is needed to enter an API key: ``PATH`` should be open to everybody.
    """
    page = read_page((files("astrai_server") / "web" / "index.html").read_bytes())

    async def show(request: web.Request) -> web.Response:
        return _respond(page, request)

    app.router.add_get(PATH, show)


def read_page(body: bytes) -> Page:
    """Hash the document and what stands inline in it.

    Args:
        body: HTML in UTF-8. Inline elements have no attributes: ``<script>``, ``<style>``.
    """
    sources = {b"script": "", b"style": ""}
    for name, text in _INLINE.findall(body):
        sources[name] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    policy = (
        "default-src 'none'",
        f"script-src{sources[b'script']}",
        f"style-src{sources[b'style']}",
        "connect-src 'self'",
        # The icon stands in the document.
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can become markup: the browser refuses innerHTML and the like.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return Page(body, hashlib.sha256(body).hexdigest()[:32], "; ".join(policy))


def _respond(page: Page, request: web.Request) -> web.Response:
    known = request.if_none_match or ()
    # A weak comparison, as RFC 9110 wants it here.
    is_known = any(tag.value in (page.etag, "*") for tag in known)
    response = web.Response(status=304) if is_known else web.Response(body=page.body)
    if not is_known:
        response.content_type, response.charset = "text/html", "utf-8"
    response.etag = ETag(page.etag)
    response.headers.update(
        {
            # Asked for again each time, so that a new server never meets an old page.
            hdrs.CACHE_CONTROL: "no-cache",
            "Content-Security-Policy": page.policy,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
    )
    return response
