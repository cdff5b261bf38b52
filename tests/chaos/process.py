"""The process of the server under attack, seen from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from chaos.client import fetch

START_TIMEOUT_S = 120
_ROOT = Path(__file__).parent.parent.parent
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServerProcess:
    """One running ``chaos.server``; ``start`` makes it.

    Args:
        process: the child.
        port: where it listens.
        log: file its log goes to.
    """

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self._process = process
        self.port = port
        self.log = log

    @classmethod
    async def start(cls, log: Path) -> ServerProcess:
        """Start a server and wait until it serves.

        Raises:
            RuntimeError: it does not; the text is its log.
        """
        paths = [str(_ROOT / "tests"), str(_ROOT), str(_ROOT / "server"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "chaos.server",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=env,
            )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            return cls(process, json.loads(line)["port"], log)
        except (TimeoutError, ValueError):
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}") from None

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Give the server a command; see ``server.Control``.

        Raises:
            RuntimeError: it failed; for an audit, the books of the pool are wrong.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        await self._process.stdin.drain()
        reply: dict[str, Any] = json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60))
        if "error" in reply:
            raise RuntimeError(f"{do}: {reply['error']}")
        return reply

    async def health(self) -> int:
        """Status of ``/health``."""
        return (await fetch(self.port, "GET", "/health")).status

    def count_files(self) -> int:
        """Open file descriptors, sockets among them."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def measure_memory(self) -> int:
        """Resident bytes."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * _PAGE_BYTES

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    async def wait(self, timeout_s: float) -> int | None:
        """Exit status; None where it still runs after ``timeout_s`` seconds."""
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None

    async def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def poll(condition: Any, timeout_s: float, period_s: float = 0.05) -> bool:
    """Wait until the coroutine function ``condition`` gives true; False where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(period_s)
    return True
