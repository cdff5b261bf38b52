"""``python -m chaos``: run all phases, print what was survived, exit 0 if nothing was found wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaos.canary import Flock
from chaos.client import BrokenAnswerError, ClosedError
from chaos.endings import ENDINGS
from chaos.phases import PHASES, Phase
from chaos.process import ServerProcess
from chaos.run import Run
from chaos.tally import Tally

LONG_SCALE = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` and run. Returns the exit status."""
    names = [phase.__name__ for phase in (*PHASES, *ENDINGS)]
    parser = argparse.ArgumentParser(prog="chaos", description="Attack a real server process.")
    parser.add_argument("--seed", type=int, help="of all inputs; default: a new one, which is printed")
    parser.add_argument("--long", action="store_true", help=f"{LONG_SCALE} times as much of everything")
    parser.add_argument("--only", action="append", choices=names, help="this phase; may be given again")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs; default: a temporary one")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    say(f"seed {seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        scale = LONG_SCALE if options.long else 1
        tally = asyncio.run(execute(seed, scale, options.only or names, directory))
    report = {"seed": seed, **tally.describe(), "seconds": round(time.monotonic() - started, 1)}
    say(json.dumps(report))
    return 1 if tally.violations else 0


async def execute(seed: int, scale: int, names: Sequence[str], directory: Path) -> Tally:
    """Run the phases called ``names`` in their order."""
    tally = Tally(phase="start")
    run = Run(await ServerProcess.start(directory / "server-0.log"), tally, Flock(tally), seed, scale)
    try:
        await run.meet()
        phases = [phase for phase in PHASES if phase.__name__ in names]
        for phase in phases:
            await _stage(run, phase)
        if phases == list(PHASES) and not (tally.num_preemptions and tally.num_evictions):
            tally.blame("no task was preempted or no prefix evicted: the pool is too large to test anything")
        for i, ending in enumerate(ending for ending in ENDINGS if ending.__name__ in names):
            if i:
                await run.server.kill()
                run.server = await ServerProcess.start(directory / f"server-{i}.log")
            with _timed(tally, ending.__name__):
                await ending(run)
                run.read_log()
    except (ClosedError, BrokenAnswerError, OSError, RuntimeError, TimeoutError) as error:
        tally.blame(f"the run cannot go on: {type(error).__name__}: {error}")
    finally:
        run.flock.cancel()
        await run.server.kill()
    return tally


async def _stage(run: Run, phase: Phase) -> None:
    """One phase beside the canaries, and the books after it."""
    with _timed(run.tally, phase.__name__):
        run.flock.start(run.server.port)
        await phase(run)
        await run.flock.stop()
        await run.settle()
        await run.compare_handles()
        run.read_log()


@contextmanager
def _timed(tally: Tally, name: str) -> Iterator[None]:
    tally.phase = name
    started, requests, violations = time.monotonic(), tally.num_requests, len(tally.violations)
    yield
    seconds, requests = time.monotonic() - started, tally.num_requests - requests
    say(f"{name}: {requests} requests, {len(tally.violations) - violations} violations, {seconds:.1f} s")


def say(line: str) -> None:
    """One line for whoever watches."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
