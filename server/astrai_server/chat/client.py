"""Questions to an OpenAI-compatible server and the answers as they arrive."""

from __future__ import annotations

import email.utils
import math
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from astrai_server.chat.address import find_api, is_loopback
from astrai_server.chat.control import make_line
from astrai_server.chat.errors import ChatError, MalformedFrameError
from astrai_server.chat.event import EventReader
from astrai_server.chat.reply import Delta, describe_body, read_frame, read_models

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 16 << 20
DONE = "[DONE]"
"""Data of the last event of a stream that ended well."""

_CUT_OFF = "the connection ended before the answer did"
_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")


class ChatClient:
    """Asks one server. Every request has a connection of its own: whoever stops reading an answer closes it,
    which is how the server learns of it.

    Args:
        url: base URL, with or without ``/v1``.
        api_key: sent as a bearer token; no error ever shows it.
        timeout_s: longest silence of the server.

    Raises:
        ValueError: ``url`` is no base URL, or ``api_key`` cannot be sent.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.api = find_api(url)
        """Address of the API, version included."""
        self._key = (api_key or "").strip()
        if self._key and not _HEADER_VALUE.fullmatch(self._key):
            raise ValueError("the API key has characters that no header can carry; is it the right text?")
        self._timeout_s = timeout_s
        self._asks_usage = True

    async def list_models(self) -> list[str]:
        """Names of the models that are served.

        Raises:
            ChatError: the server cannot be reached, refuses or answers something else.
        """
        with self._hide_key(), self._explain():
            async with (
                self._open() as http,
                http.get(f"{self.api}/models", allow_redirects=False) as response,
            ):
                await self._check(response)
                return read_models(await _read(response))

    async def ask(self, body: dict[str, Any]) -> AsyncGenerator[Delta, None]:
        """Send a chat completion and pass on what comes.

        Args:
            body: of the request, but for ``stream`` and ``stream_options``.

        Raises:
            ChatError: the server cannot be reached, refuses, breaks off or answers something else.
        """
        with self._hide_key(), self._explain():
            async with self._open() as http, await self._post(http, body) as response:
                async for delta in _read_answer(response):
                    yield delta

    def _open(self) -> aiohttp.ClientSession:
        headers = {"Accept": "text/event-stream, application/json", "User-Agent": "astrai-chat"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._timeout_s
            ),
            # A proxy is of no use on the way to this machine.
            trust_env=not is_loopback(self.api),
        )

    async def _post(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> aiohttp.ClientResponse:
        while True:
            options = {"stream_options": {"include_usage": True}} if self._asks_usage else {}
            response = await http.post(
                f"{self.api}/chat/completions",
                json={**body, "stream": True, **options},
                allow_redirects=False,
            )
            try:
                await self._check(response)
            except ChatError as error:
                response.close()
                if not self._asks_usage or "stream_options" not in str(error):
                    raise
                # Some servers know no such field; their usage is then missing, or in the stream anyway.
                self._asks_usage = False
                continue
            return response

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        message = describe_body(await _read(response, 1 << 16)) or make_line(response.reason or "")
        raise ChatError(
            self._explain_status(response, message),
            status=response.status,
            retry_after_s=_read_retry_after(response.headers.get("Retry-After")),
        )

    def _explain_status(self, response: aiohttp.ClientResponse, message: str) -> str:
        status = response.status
        cause = f": {message}" if message else ""
        if status == 401 and not self._key:
            return f"the server wants an API key (401){cause}; give it as OPENAI_API_KEY or with --api-key"
        if status in (401, 403):
            return f"the server refuses {'this API key' if self._key else 'access'} ({status}){cause}"
        if status == 404:
            return f"{response.url} answers 404{cause}; are --url and --model right?"
        if status == 429:
            return f"the server is busy (429){cause}"
        if status == 503:
            return f"the server is not ready (503){cause}"
        if 300 <= status < 400:
            target = make_line(response.headers.get("Location", "somewhere else"), 100)
            return f"the server points to {target} ({status}); use the right address with --url"
        return f"the server answers {status}{cause}"

    @contextmanager
    def _hide_key(self) -> Iterator[None]:
        """Some servers repeat the key that they refuse."""
        try:
            yield
        except ChatError as error:
            if self._key and self._key in str(error):
                error.args = (str(error).replace(self._key, "***"),)
            raise

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Turn what aiohttp raises into one line."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise ChatError(f"no connection to {self.api} within {CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise ChatError(f"the server sent nothing for {self._timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise ChatError(self._explain_connection(error)) from error
        except aiohttp.ServerDisconnectedError as error:
            raise ChatError("the server closed the connection without an answer") from error
        except aiohttp.ClientResponseError as error:
            raise ChatError(f"{self.api} speaks no HTTP: {make_line(error.message, 100)}") from error
        except aiohttp.ClientPayloadError as error:
            raise ChatError(_CUT_OFF) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ChatError(
                f"the connection broke: {make_line(str(error)) or type(error).__name__}"
            ) from error

    def _explain_connection(self, error: aiohttp.ClientConnectorError) -> str:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            reason = str(error.certificate_error)
        elif isinstance(error.os_error, ssl.SSLError):
            reason = f"no TLS there ({error.os_error.reason}); is it http:// rather than https://?"
        else:
            number = error.os_error.errno or 0
            # Numbers below zero are those of a failed look-up of the name.
            reason = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
        hint = "; `astrai serve` starts a server" if is_loopback(self.api) else ""
        return f"cannot reach {self.api}: {make_line(reason)}{hint}"


async def _read_answer(response: aiohttp.ClientResponse) -> AsyncIterator[Delta]:
    if response.content_type.endswith("json"):
        # Some servers do not stream, whatever they are asked.
        yield read_frame((await _read(response)).decode("utf-8", "replace"))
        return
    events = EventReader()
    is_finished = has_frames = False
    async for piece in response.content.iter_any():
        for data in events.feed(piece):
            if data.strip() == DONE:
                return
            delta = read_frame(data)
            has_frames = True
            is_finished = is_finished or delta.finish_reason is not None
            yield delta
    for data in events.finish():
        # Only the empty line may be missing, or more than that.
        if data.strip() == DONE:
            return
        try:
            delta = read_frame(data)
        except MalformedFrameError as error:
            raise ChatError(_CUT_OFF) from error
        is_finished = is_finished or delta.finish_reason is not None
        yield delta
    if is_finished:
        return
    if not has_frames and response.content_type != "text/event-stream":
        raise ChatError(f"wanted a stream of events, got {response.content_type}; is --url right?")
    raise ChatError(_CUT_OFF)


async def _read(response: aiohttp.ClientResponse, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) >= max_bytes:
            break
    return bytes(body[:max_bytes])


def _read_retry_after(value: str | None) -> float | None:
    """Seconds, whether the header has seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
