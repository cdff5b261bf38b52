"""``/metrics`` for Prometheus: the engine is asked when it is scraped, what the server sees is kept here."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from astrai_server.gate import EngineGate, State
from astrai_triton import __version__
from astrai_triton.errors import EngineUnavailableError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

GAP_BOUNDS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
"""Finer than the others: what is asked is whether 20 ms became 30."""
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
DURATION_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
TOKEN_BOUNDS = tuple(float(2**i) for i in range(18))

# Name, what it is, key in the engine's statistics.
_ENGINE_GAUGES = (
    ("tasks_running", "Tasks that hold a row of the KV cache.", "active_tasks"),
    ("tasks_waiting", "Accepted tasks that do not run yet.", "waiting_queue"),
    ("kv_capacity_pages", "Pages of the KV pool.", "pages_total"),
)
_ENGINE_COUNTERS = (
    ("tasks_accepted", "Tasks accepted.", "total_tasks"),
    ("sampled_tokens", "Tokens sampled.", "total_tokens"),
    ("preemptions", "Tasks sent back to the queue because the KV pool was full.", "preemptions"),
    ("recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens"),
    ("kv_evicted_pages", "Cached pages that had to go to make room.", "evicted_pages"),
)
_UNITS = frozenset({"seconds", "tokens", "pages", "ratio"})


class Histogram:
    """How many values fell between which bounds. For one thread.

    Args:
        bounds: ascending; a value belongs to the first bound that is not below it.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Take in ``value``, ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def describe(self, name: str, documentation: str) -> Metric:
        """The histogram as it is now."""
        return _describe_histogram(name, documentation, self._bounds, self._counts, self._total)


class Metrics:
    """Everything an operator may want to watch, as Prometheus reads it. For the event loop's thread.

    Labels have few values: routes, statuses and reasons that the server names, and names of API keys. Nothing
    that a client writes becomes one.

    Args:
        gate: where the engine is, or will be. Without one, and with a dead one, there are the metrics that
            there are.
    """

    def __init__(self, gate: EngineGate) -> None:
        self._gate = gate
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self._gap = Histogram(GAP_BOUNDS_S)
        self._duration = Histogram(DURATION_BOUNDS_S)
        self._prompt_len = Histogram(TOKEN_BOUNDS)
        self._answer_len = Histogram(TOKEN_BOUNDS)
        self._responses: Counter[tuple[str, int]] = Counter()
        self._key_to_tokens: dict[str, int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def observe_first_token(self, seconds: float) -> None:
        """A stream's first token was there, ``seconds`` after its request."""
        self._first_token.observe(seconds)

    def observe_gaps(self, seconds: float, count: int) -> None:
        """``count`` more tokens of a stream went out, ``seconds`` after those before; none changes nothing.

        Tokens that come together share the time evenly: the sum over a stream is its time, the number its
        tokens but the first.
        """
        if count > 0:
            self._gap.observe(seconds / count, count)

    def observe_end(self, seconds: float, prompt_tokens: int, answer_tokens: int) -> None:
        """An admitted request is over, however it ended.

        Args:
            seconds: since it came.
            prompt_tokens: tokens of its prompts, cached ones too.
            answer_tokens: tokens sampled for it, over all its choices.
        """
        self._duration.observe(seconds)
        self._prompt_len.observe(prompt_tokens)
        self._answer_len.observe(answer_tokens)

    def count_response(self, route: str, status: int) -> None:
        """A request has its response.

        Args:
            route: as the router spells it (``/v1/models/{id}``), never the path that was asked for.
            status: as it is logged.
        """
        self._responses[route, status] += 1

    async def handle(self, request: web.Request) -> web.Response:
        """Answer ``GET /metrics``."""
        body, content_type = self.render(",".join(request.headers.getall("Accept", ())))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Write all metrics down.

        Args:
            accept: the ``Accept`` header: OpenMetrics where it asks for that, else Prometheus' text format.

        Returns:
            The body and its content type.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # A version that is none.
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for; all of one moment, as nothing else runs in this thread meanwhile."""
        yield _describe_labels("build", "This program.", {"version": __version__})
        yield from self._describe_server()
        try:
            engine = self._gate.engine
        except EngineUnavailableError:
            return
        stats = engine.get_stats()
        yield from _describe_engine(engine, stats)
        tokens = self._take_key_tokens(stats["tokens_by_key"])
        yield _counter_by(
            "key_tokens", "Prompt tokens computed and tokens sampled, by API key.", "key", tokens
        )

    def _describe_server(self) -> Iterator[Metric]:
        states = {state: float(state == self._gate.state) for state in get_args(State)}
        yield _gauge_by("server_state", "1 for the state it is in.", "state", states)
        yield _gauge("requests_in_progress", "Requests let in and not answered yet.", self._gate.num_inside)
        responses = CounterMetricFamily(
            "astrai_http_requests", "Responses by route and status.", labels=("route", "status")
        )
        for (route, status), count in sorted(self._responses.items()):
            responses.add_metric((route, str(status)), count)
        yield responses
        yield self._first_token.describe("time_to_first_token_seconds", "From a request to its first token.")
        yield self._gap.describe("inter_token_seconds", "Between tokens of a stream, as they are sent.")
        yield self._duration.describe("request_duration_seconds", "Until an admitted request was over.")
        yield self._prompt_len.describe("request_prompt_tokens", "Prompt tokens, by request.")
        yield self._answer_len.describe("request_answer_tokens", "Tokens sampled, by request.")

    def _take_key_tokens(self, tokens_by_key: Mapping[str, int]) -> Mapping[str, int]:
        """The counts of the engine, never lower than they were: a task that ends between two reads of the
        statistics is missing in them once, and Prometheus takes a lower count for a restart."""
        before = self._key_to_tokens
        self._key_to_tokens = {
            key: max(tokens, before.get(key, 0)) for key, tokens in sorted(tokens_by_key.items())
        }
        return self._key_to_tokens


def _describe_engine(engine: InferenceEngine, stats: Mapping[str, Any]) -> Iterator[Metric]:
    model, pool, steps = engine.model, engine.pool.stats(), engine.step_histogram()
    labels = {
        "model": engine.model_name,
        "arch": model.config.arch,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }
    yield _describe_labels("model", "The model that is served.", labels)
    yield _gauge("context_tokens", "Longest prompt and answer together.", engine.max_seq_len)
    for name, documentation, key in _ENGINE_GAUGES:
        yield _gauge(name, documentation, stats[key])
    pages = {state: stats[f"pages_{state}"] for state in ("free", "used", "cached")}
    yield _gauge_by("kv_pages", "Pages of the KV pool; used ones belong to tasks.", "state", pages)
    used = pages["used"] / max(1, stats["pages_total"])
    yield _gauge("kv_used_ratio", "Share of the KV pool that tasks hold.", used)
    yield _gauge("queue_wait_seconds", "Moving average until a task starts.", stats["queue_wait_ms"] / 1e3)
    for name, documentation, key in _ENGINE_COUNTERS:
        yield _counter(name, documentation, stats[key])
    yield _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", pool.hits_tokens)
    yield _counter("prefix_cache_lookup_tokens", "Prompt tokens looked up in it.", pool.lookup_tokens)
    yield _counter_by("tasks_finished", "Tasks that ended, by reason.", "reason", stats["finished"])
    documentation = "Steps of the engine, the model's time included."
    yield _describe_histogram("step_duration_seconds", documentation, steps.bounds, steps.counts, steps.total)


def _describe_labels(name: str, documentation: str, labels: Mapping[str, str]) -> Metric:
    # The name of a directory need not be UTF-8.
    clean = {key: text.encode("utf-8", "replace").decode() for key, text in labels.items()}
    return InfoMetricFamily(f"astrai_{name}", documentation, clean)


def _describe_histogram(
    name: str, documentation: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """``counts`` has one more than ``bounds``, and is not cumulative."""
    ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    buckets = list(zip(ends, itertools.accumulate(counts), strict=True))
    return HistogramMetricFamily(f"astrai_{name}", documentation, buckets, total, unit=_find_unit(name))


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _describe_value(family: _Family, name: str, documentation: str, value: float) -> Metric:
    return family(f"astrai_{name}", documentation, value, unit=_find_unit(name))


def _describe_values(
    family: _Family, name: str, documentation: str, label: str, values: Mapping[str, float]
) -> Metric:
    metric = family(f"astrai_{name}", documentation, labels=(label,), unit=_find_unit(name))
    for key, value in values.items():
        metric.add_metric((key,), value)
    return metric


_gauge = partial(_describe_value, GaugeMetricFamily)
_gauge_by = partial(_describe_values, GaugeMetricFamily)
_counter = partial(_describe_value, CounterMetricFamily)
_counter_by = partial(_describe_values, CounterMetricFamily)


def _find_unit(name: str) -> str:
    """The unit that the name ends with."""
    last = name.rpartition("_")[2]
    return last if last in _UNITS else ""
