"""``/metrics``: what Prometheus reads is well formed, and true."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import prometheus_client
import pytest
import yaml
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from astrai_server.gate import EngineGate, State
from astrai_server.metrics import Histogram, Metrics
from astrai_triton import __version__
from astrai_triton.engine import InferenceEngine, SamplingParams
from fakes import ByteTokenizer, ScriptedModel

EXAMPLE = Path(__file__).parents[2] / "configs" / "prometheus.yml"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
# As Prometheus 3 sends it.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

Samples = dict[str, float]


def build_engine(**options: Any) -> InferenceEngine:
    options = {"max_batch_size": 4, "max_seq_len": 256, "page_size": 4, "n_tokens": 1024} | options
    return InferenceEngine(ScriptedModel(), ByteTokenizer(), **options)


def parse(metrics: Metrics, accept: str = "") -> list[Metric]:
    body, content_type = metrics.render(accept)
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    return list((parse_openmetrics if is_openmetrics else parse_text)(body.decode()))


def flatten(families: Iterable[Metric]) -> Samples:
    """``name{label="value"}`` -> value, labels sorted, without those of the process."""
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = ",".join(f'{name}="{text}"' for name, text in sorted(sample.labels.items()))
        samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name: value for name, value in samples.items() if not name.startswith("process_")}


def scrape(metrics: Metrics, accept: str = "") -> Samples:
    return flatten(parse(metrics, accept))


def list_buckets(samples: Samples, name: str) -> list[float]:
    """Of a histogram without labels, in order."""
    return [value for key, value in samples.items() if key.startswith(f"{name}_bucket{{")]


# Form


@pytest.mark.parametrize("has_engine", [False, True])
def test_both_formats_are_well_formed_and_say_the_same(has_engine: bool) -> None:
    with build_engine() as engine:
        engine.generate("hello", temperature=0, max_tokens=3)
    # Nothing changes any more between two scrapes.
    metrics = Metrics(EngineGate(engine if has_engine else None))
    metrics.count_response("/v1/messages", 200)
    metrics.observe_end(1.5, 5, 3)
    assert scrape(metrics, OPENMETRICS) == scrape(metrics) == scrape(metrics, PROMETHEUS)


def test_names_follow_the_conventions() -> None:
    with build_engine() as engine:
        families = parse(Metrics(EngineGate(engine)), OPENMETRICS)
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith(("astrai_", "process_"))
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|milliseconds|total|count|sum|bucket)\b", family.name)
        assert family.type != "unknown"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4;"),
        ("application/json,*/*", "text/plain; version=0.0.4;"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0;"),
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0;"),
        ("application/openmetrics-text;version=new", "text/plain; version=0.0.4;"),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, expected: str) -> None:
    body, content_type = Metrics(EngineGate()).render(accept)
    assert content_type.startswith(expected)
    assert body.endswith(b"# EOF\n") == expected.startswith("application")


@given(accept=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80))
def test_no_accept_header_fails(accept: str) -> None:
    metrics = Metrics(EngineGate())
    for text in (accept, f"text/plain;version={accept}", f"application/openmetrics-text;version={accept}"):
        assert b"astrai_build_info" in metrics.render(text)[0]


def test_every_server_has_metrics_of_its_own_and_leaves_the_global_ones_alone() -> None:
    first, second = (Metrics(EngineGate()) for _ in range(2))
    first.count_response("/health", 200)
    assert b"/health" in first.render()[0]
    assert b"/health" not in second.render()[0]
    assert b"astrai" not in generate_latest(prometheus_client.REGISTRY)


@pytest.mark.parametrize(
    ("given_name", "shown"), [('a "b"\\\nc', 'a "b"\\\nc'), ("modèle", "modèle"), ("x\udcff", "x?")]
)
def test_any_model_name_can_be_shown(given_name: str, shown: str) -> None:
    with build_engine(model_name=given_name) as engine:
        metrics = Metrics(EngineGate(engine))
        for accept in ("", OPENMETRICS):
            (family,) = (family for family in parse(metrics, accept) if "astrai_model" in family.name)
            labels = {"model": shown, "arch": "llama", "dtype": "float32", "device": "cpu"}
            assert family.samples[0].labels == labels


def test_the_example_configuration_scrapes_and_names_metrics_that_exist() -> None:
    text = EXAMPLE.read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["job_name"] == "astrai"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    with build_engine() as engine:
        metrics = Metrics(EngineGate(engine))
        metrics.count_response("/v1/messages", 429)
        names = {sample.name for family in parse(metrics) for sample in family.samples}
    named = set(re.findall(r"astrai_\w+", text))
    assert len(named) > 10
    assert named <= names


# States


def state_of(samples: Samples) -> str:
    """The one state that is 1; the others are 0."""
    states = {state: samples[f'astrai_server_state{{state="{state}"}}'] for state in get_args(State)}
    assert sorted(states.values()) == [0, 0, 0, 1]
    return max(states, key=lambda state: states[state])


def test_a_server_that_loads_has_metrics_without_an_engine() -> None:
    gate = EngineGate()
    metrics = Metrics(gate)
    samples = scrape(metrics)
    assert state_of(samples) == "loading"
    assert samples[f'astrai_build_info{{version="{__version__}"}}'] == 1
    assert samples["astrai_inter_token_seconds_count"] == 0
    assert "astrai_tasks_running" not in samples
    gate.drain()
    assert state_of(scrape(metrics)) == "draining"


def test_the_engine_is_in_the_metrics_as_soon_as_it_is_loaded() -> None:
    gate = EngineGate()
    metrics = Metrics(gate)
    with build_engine() as engine:
        gate.open(engine)
        samples = scrape(metrics)
    assert (state_of(samples), samples["astrai_tasks_running"]) == ("ready", 0)


def test_a_dead_engine_still_tells_what_it_did() -> None:
    with build_engine() as engine:
        engine.generate("hello", temperature=0, max_tokens=3)
    samples = scrape(Metrics(EngineGate(engine)))
    assert (state_of(samples), samples["astrai_sampled_tokens_total"]) == ("dead", 3)


def test_requests_inside_are_those_of_the_gate() -> None:
    with build_engine() as engine:
        gate = EngineGate(engine)
        metrics = Metrics(gate)
        with gate.enter(), gate.enter():
            assert scrape(metrics)["astrai_requests_in_progress"] == 2
        assert scrape(metrics)["astrai_requests_in_progress"] == 0


# The engine


def test_counters_and_gauges_are_those_of_the_engines_run() -> None:
    with build_engine(start=False) as engine:
        metrics = Metrics(EngineGate(engine))
        params = SamplingParams(temperature=0, max_tokens=5)
        handles = [engine.submit(list(b"0123456789"), params, key="alice")]
        while not handles[0].take() or engine.get_stats()["active_tasks"]:
            engine.step()
        # Two pages of ten tokens are complete and found; the third is shorter than a page.
        handles += [engine.submit(list(b"0123456789"), params, key="bob") for _ in range(5)]
        handles[-1].cancel()
        waiting = scrape(metrics)
        engine.step()
        running = scrape(metrics)
        while engine.get_stats()["active_tasks"] or engine.get_stats()["waiting_queue"]:
            engine.step()
        done = scrape(metrics)
    assert (waiting["astrai_tasks_waiting"], waiting["astrai_tasks_running"]) == (5, 0)
    assert (running["astrai_tasks_waiting"], running["astrai_tasks_running"]) == (0, 4)
    assert running['astrai_kv_pages{state="used"}'] > 0
    assert running["astrai_kv_used_ratio"] == running['astrai_kv_pages{state="used"}'] / 256
    for samples in (waiting, running, done):
        pages = [samples[f'astrai_kv_pages{{state="{state}"}}'] for state in ("free", "used", "cached")]
        assert sum(pages) == samples["astrai_kv_capacity_pages"] == 256
    expected = {
        "astrai_context_tokens": 256,
        "astrai_tasks_accepted_total": 6,
        "astrai_sampled_tokens_total": 25,
        "astrai_preemptions_total": 0,
        "astrai_prefix_cache_lookup_tokens_total": 50,
        "astrai_prefix_cache_hit_tokens_total": 4 * 8,
        'astrai_tasks_finished_total{reason="length"}': 5,
        'astrai_tasks_finished_total{reason="cancelled"}': 1,
        'astrai_tasks_finished_total{reason="stop"}': 0,
        'astrai_tasks_finished_total{reason="error"}': 0,
        'astrai_key_tokens_total{key="alice"}': 10 + 5,
        'astrai_key_tokens_total{key="bob"}': 4 * (2 + 5),
    }
    assert {name: done[name] for name in expected} == expected


def test_evictions_preemptions_and_what_they_cost_are_counted() -> None:
    with build_engine(n_tokens=256, max_queue=64, start=False) as engine:
        params = SamplingParams(temperature=0, max_tokens=100)
        handles = [engine.submit([65 + i, *b"prompt"], params) for i in range(8)]
        while engine.get_stats()["waiting_queue"] or engine.get_stats()["active_tasks"]:
            engine.step()
        stats, samples = engine.get_stats(), scrape(Metrics(EngineGate(engine)))
    assert all(handle.take()[-1].finish_reason == "length" for handle in handles)
    assert samples["astrai_preemptions_total"] == stats["preemptions"] > 0
    assert samples["astrai_recomputed_tokens_total"] == stats["recomputed_tokens"] > 0
    assert samples["astrai_kv_evicted_pages_total"] == stats["evicted_pages"] > 0


def test_every_step_is_in_the_histogram_of_steps() -> None:
    with build_engine() as engine:
        metrics = Metrics(EngineGate(engine))
        before = scrape(metrics)
        engine.generate("hello", temperature=0, max_tokens=20)
        engine.drain(10)
    after = scrape(metrics)
    name = "astrai_step_duration_seconds"
    assert before[f"{name}_count"] == before[f"{name}_sum"] == 0
    buckets = list_buckets(after, name)
    assert buckets == sorted(buckets)
    assert buckets[-1] == after[f"{name}_count"] == engine.get_stats()["steps"] > 10
    assert after[f"{name}_sum"] > 0


def test_nothing_that_counts_ever_falls_while_the_engine_runs() -> None:
    with build_engine(n_tokens=256, max_queue=256) as engine:
        metrics = Metrics(EngineGate(engine))
        params = SamplingParams(temperature=0, max_tokens=40)
        handles = [engine.submit([65 + i % 8, *b"prompt"], params, key=f"key-{i % 3}") for i in range(48)]
        scrapes = [scrape(metrics)]
        while engine.get_stats()["waiting_queue"] or engine.get_stats()["active_tasks"]:
            scrapes.append(scrape(metrics))
    scrapes.append(scrape(metrics))
    assert len(scrapes) > 3
    for before, after in pairwise(scrapes):
        for name, value in before.items():
            if re.match(r"\w+_(total|bucket|count|sum)\b", name):
                assert after[name] >= value, name
    keys = [scrapes[-1][f'astrai_key_tokens_total{{key="key-{i}"}}'] for i in range(3)]
    assert sum(keys) == 48 * 40 + sum(handle.prompt_len - handle.cached_tokens for handle in handles)


class FakeStats:
    """An engine whose counts of keys are what the test says."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.tokens_by_key: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def get_stats(self) -> dict[str, Any]:
        return self._engine.get_stats() | {"tokens_by_key": self.tokens_by_key}


def test_a_key_that_is_read_too_low_once_keeps_its_count_and_a_forgotten_one_begins_again() -> None:
    with build_engine() as engine:
        fake: Any = FakeStats(engine)
        metrics = Metrics(EngineGate(fake))
        counts = []
        for tokens in ({"a": 10}, {"a": 7, "b": 1}, {"a": 12}, {"a": 12, "b": 0}):
            fake.tokens_by_key = tokens
            samples = scrape(metrics)
            names = {key: f'astrai_key_tokens_total{{key="{key}"}}' for key in "ab"}
            counts.append({key: samples[name] for key, name in names.items() if name in samples})
    assert counts == [{"a": 10}, {"a": 10, "b": 1}, {"a": 12}, {"a": 12, "b": 0}]


# What the server sees


@given(
    bounds=st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True).map(sorted),
    values=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5))),
)
def test_a_bucket_counts_the_values_that_are_not_above_its_bound(
    bounds: list[int], values: list[tuple[int, int]]
) -> None:
    histogram = Histogram(bounds)
    for value, count in values:
        histogram.observe(value, count)
    source: Any = SimpleNamespace(collect=lambda: [histogram.describe("test", "A test.")])
    samples = flatten(parse_text(generate_latest(source).decode()))
    flat = [value for value, count in values for _ in range(count)]
    assert list_buckets(samples, "astrai_test") == [
        *(sum(value <= bound for value in flat) for bound in bounds),
        len(flat),
    ]
    assert samples["astrai_test_count"] == len(flat)
    assert samples["astrai_test_sum"] == sum(flat)


def test_tokens_that_go_out_together_share_the_time_since_those_before() -> None:
    metrics = Metrics(EngineGate())
    metrics.observe_gaps(0.02, 1)
    metrics.observe_gaps(0.04, 4)
    metrics.observe_gaps(99.0, 0)
    samples = scrape(metrics)
    assert samples["astrai_inter_token_seconds_count"] == 5
    assert samples["astrai_inter_token_seconds_sum"] == pytest.approx(0.06)
    assert samples['astrai_inter_token_seconds_bucket{le="0.0075"}'] == 0
    assert samples['astrai_inter_token_seconds_bucket{le="0.01"}'] == 4
    assert samples['astrai_inter_token_seconds_bucket{le="0.02"}'] == 5


def test_first_tokens_and_ends_are_told_apart() -> None:
    metrics = Metrics(EngineGate())
    metrics.observe_first_token(0.25)
    metrics.observe_end(12.5, 100, 7)
    metrics.observe_end(0.5, 3, 0)
    samples = scrape(metrics)
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 0.25),
        ("request_duration_seconds", 2, 13.0),
        ("request_prompt_tokens", 2, 103),
        ("request_answer_tokens", 2, 7),
        ("inter_token_seconds", 0, 0),
    ):
        assert (samples[f"astrai_{name}_count"], samples[f"astrai_{name}_sum"]) == (count, total)
    assert samples['astrai_request_answer_tokens_bucket{le="1.0"}'] == 1


def test_responses_are_counted_by_route_and_status() -> None:
    metrics = Metrics(EngineGate())
    for route, status in (("/v1/messages", 200), ("/v1/messages", 200), ("/v1/messages", 429), ("-", 404)):
        metrics.count_response(route, status)
    assert {name: value for name, value in scrape(metrics).items() if "http_requests" in name} == {
        'astrai_http_requests_total{route="-",status="404"}': 1,
        'astrai_http_requests_total{route="/v1/messages",status="200"}': 2,
        'astrai_http_requests_total{route="/v1/messages",status="429"}': 1,
    }


# Over HTTP


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], "text/plain"),
        ([("Accept", PROMETHEUS)], "application/openmetrics-text"),
        ([("Accept", "text/html"), ("Accept", OPENMETRICS)], "application/openmetrics-text"),
    ],
)
def test_the_response_has_the_format_that_was_asked_for(headers: Any, expected: str) -> None:
    metrics = Metrics(EngineGate())
    response = asyncio.run(metrics.handle(make_mocked_request("GET", "/metrics", CIMultiDict(headers))))
    assert isinstance(response.body, bytes)
    parse_body = parse_text if expected == "text/plain" else parse_openmetrics
    assert flatten(parse_body(response.body.decode())) == scrape(metrics)
    assert (response.status, response.content_type, response.charset) == (200, expected, "utf-8")
