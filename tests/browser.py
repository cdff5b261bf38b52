"""A headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import attrs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_TIMEOUT_S = 60
WAIT_S = 20

_FLAGS = (
    "--headless=new",
    # Containers run as root and have a small /dev/shm.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
    "--lang=en-US",
)

_KEYS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
)
"""Name of a key -> its code and the text it types."""

_CONTROL, _SHIFT = 2, 8


def find_chromium() -> str | None:
    """Path of the first Chromium on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def start_chromium(executable: str, profile: Path) -> Iterator[str]:
    """Run a Chromium with the empty directory ``profile`` as its profile; yields the URL of its DevTools."""
    with (profile / "log").open("w") as log:
        process = subprocess.Popen(
            [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=log,
            stderr=subprocess.STDOUT,
            # It starts many processes, and all of them have to end.
            start_new_session=True,
        )
    try:
        yield _find_devtools(process, profile)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _find_devtools(process: subprocess.Popen[bytes], profile: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            port, path = (profile / "DevToolsActivePort").read_text().split()
            return f"ws://127.0.0.1:{port}{path}"
        assert process.poll() is None, (profile / "log").read_text()
        assert time.monotonic() < deadline, (profile / "log").read_text()
        time.sleep(0.02)


@attrs.frozen
class Problem:
    """Something the browser complained of."""

    source: str
    """``exception``, ``console``, or who logged it: ``network``, ``security``, ..."""
    text: str


class Page:
    """One tab with a profile of its own.

    Args:
        socket: the browser's DevTools.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reader = asyncio.create_task(self._read())
        self.problems: list[Problem] = []

    # The protocol

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one method, of the tab once there is one; fails on an error."""
        number = next(self._ids)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params} | session)
        answer = await asyncio.wait_for(future, WAIT_S)
        assert "error" not in answer, (method, params, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.problems.append(Problem("exception", text))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            text = " ".join(str(argument.get("value", argument)) for argument in params["args"])
            self.problems.append(Problem("console", text))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(Problem(params["entry"]["source"], params["entry"]["text"]))

    async def attach(self, context: str) -> None:
        """Open a tab in the browser context of that id."""
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")

    async def detach(self) -> None:
        """Talk to the browser again instead of the tab."""
        self._session = None

    async def close(self) -> None:
        """Stop listening."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    # What a test does

    async def go(self, url: str) -> None:
        """Load a page and wait for it to be complete."""
        await self.call("Page.navigate", url=url)
        await self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def reload(self) -> None:
        """Load the page anew and wait for it to be complete."""
        await self.evaluate("void (window.isOld = true)")
        await self.call("Page.reload")
        await self.wait("!window.isOld && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited if it is a promise; fails where it throws."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Return once a JavaScript expression is truthy."""
        deadline = time.monotonic() + timeout_s
        while not await self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                text = await self.evaluate("document.body.innerText")
                raise AssertionError(f"not within {timeout_s} s: {expression}\n{self.problems}\n{text}")
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        """Visible text of an element that there is."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element, which must be what lies there."""
        found = await self.evaluate(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "nearest" }});
                const box = element.getBoundingClientRect();
                const x = box.x + box.width / 2, y = box.y + box.height / 2;
                return {{ x, y, isOnTop: element.contains(document.elementFromPoint(x, y)) }};
            }})()"""
        )
        assert found["isOnTop"], f"{selector} is covered or out of sight: {found}"
        place = {"x": found["x"], "y": found["y"], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **place)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release one key."""
        code, text = _KEYS[key]
        event = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": _SHIFT if shift else 0,
        }
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        """Enter text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def paste(self) -> None:
        """Paste the clipboard where the focus is."""
        event = {"key": "v", "code": "KeyV", "windowsVirtualKeyCode": 86, "modifiers": _CONTROL}
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown", commands=["paste"], **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def show_on(
        self, width: int, height: int, *, scale: float = 1, theme: str = "light", is_mobile: bool = False
    ) -> None:
        """Set the size of the screen in CSS pixels, its pixel ratio, and the theme the system prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_mobile,
        )
        features = [{"name": "prefers-color-scheme", "value": theme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """The visible part as a PNG."""
        image = await self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        return base64.b64decode(image["data"])

    async def read_accessibility_tree(self) -> list[dict[str, Any]]:
        """What assistive technology sees: nodes with ``role``, ``name`` and ``properties``."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                "properties": {
                    item["name"]: item["value"].get("value") for item in node.get("properties", ())
                },
            }
            for node in nodes
            if not node["ignored"]
        ]


@asynccontextmanager
async def open_page(devtools: str, url: str, **screen: Any) -> AsyncIterator[Page]:
    """Open ``url`` in a fresh profile of a running browser; ``screen`` as ``Page.show_on`` takes it."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(devtools, max_msg_size=0) as socket,
    ):
        page = Page(socket)
        context = (await page.call("Target.createBrowserContext"))["browserContextId"]
        try:
            await page.attach(context)
            await page.show_on(**({"width": 1280, "height": 800} | screen))
            await page.go(url)
            yield page
        finally:
            await page.detach()
            await page.call("Target.disposeBrowserContext", browserContextId=context)
            await page.close()
