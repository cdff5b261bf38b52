"""Where a server is: what people write after ``--url`` -> the address of its API."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_ROUTES = ("/chat/completions", "/completions", "/models")
_USER = re.compile("//.*@")
_VERSION = re.compile(r"v\d\w*", re.ASCII)


def find_api(url: str) -> str:
    """The address that ``/chat/completions`` is appended to.

    Args:
        url: with or without a scheme (http), a version (``/v1``) or a route behind it.

    Raises:
        ValueError: no address of an HTTP server; the text never shows a password in it.
    """
    shown = _USER.sub("//***@", url)
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"wanted http://HOST:PORT, got {shown!r}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("wanted an address without a user and a password; use --api-key")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"wanted http://HOST:PORT or https://HOST, got {shown!r}")
    if parts.query or parts.fragment:
        raise ValueError(f"wanted an address without ? and #, got {shown!r}")
    path = parts.path.rstrip("/")
    for route in _ROUTES:
        path = path.removesuffix(route)
    if not any(_VERSION.fullmatch(step) for step in path.split("/")):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(url: str) -> bool:
    """Whether ``url`` is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
