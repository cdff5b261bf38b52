from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from astrai_bench.cli import bench
from astrai_bench.steps import simulate_load, time_steps
from astrai_bench.streams import time_streams


def test_steps_are_timed_without_the_forward() -> None:
    times = time_steps(3, 12)
    assert times.num_tasks == 3
    assert 0 < times.p50_us <= times.p99_us
    assert times.model_us > 0


def test_a_short_prompt_waits_less_when_long_ones_share_the_step() -> None:
    budget, fcfs = simulate_load("budget", 60), simulate_load("fcfs", 60)
    assert budget.ttft_short_p95_ms < fcfs.ttft_short_p95_ms
    # A full step of 512 tokens takes 4 + 51.2 ms, and a decode after it 4 ms and little more.
    assert max(budget.worst_gap_ms, fcfs.worst_gap_ms) < 70


def test_a_simulated_load_is_the_same_every_time() -> None:
    assert simulate_load("budget", 30) == simulate_load("budget", 30)


def test_every_stream_gets_its_tokens() -> None:
    times = time_streams(2, 8)
    assert (times.num_streams, times.num_tokens) == (2, 8)
    assert times.cpu_us > 0
    assert times.send_us > 0


def test_the_last_line_is_json_and_goes_to_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    result = CliRunner().invoke(bench, ["engine", "--steps", "10", "--no-http", "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])
    assert document == json.loads(path.read_text())
    assert [row["num_tasks"] for row in document["steps"]] == [1, 16, 64, 256, 64]
    assert {row["policy"] for row in document["policies"]} == {"budget", "fcfs"}
    assert document["streams"] == []
    assert "target 100 µs" in result.output
