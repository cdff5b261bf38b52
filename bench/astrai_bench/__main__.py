"""``python -m astrai_bench``: ``astrai bench`` where the server is not installed."""

from __future__ import annotations

from astrai_bench.cli import bench
from astrai_bench.errors import BenchError

if __name__ == "__main__":
    try:
        bench(prog_name="python -m astrai_bench")
    except BenchError as error:
        raise SystemExit(f"Error: {error}") from error
