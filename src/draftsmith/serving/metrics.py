"""What `/metrics` reports to Prometheus: vLLM's names, which dashboards and load generators know, and our own.

Draft tokens are verified nodes of a tree, and a position is a depth: the accepted tokens at position d are the steps
that accepted more than d guesses.
"""

import time
from collections import Counter as Count
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from draftsmith.engine.reasons import LABELS
from draftsmith.serving.health import Health
from draftsmith.serving.health_metrics import HealthMetrics
from draftsmith.serving.meter import UNTOLD, Histogram, Meter

L = TypeVar("L", bound=tuple[str, ...])
"""The values of a metric's own labels."""

ENGINE = "0"
REASONS = ("stop", "length", "abort", "error", "deadline")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EngineMetrics(Collector):
    """The metrics of an engine, read from its meter on each scrape."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._drafts()
        yield from self._own()

    def _labels(self, *more: str) -> list[str]:
        return [self._meter.model, ENGINE, *more]

    def _gauges(self) -> Iterator[Metric]:
        core = self._meter.core
        load = core.scheduler.load()
        values = {
            "num_requests_running": ("Texts that are written or whose prompt is read.", load.decoding + load.reading),
            "num_requests_waiting": ("Texts that wait for room.", load.waiting),
            "kv_cache_usage_perc": (
                "Share of the cache in use, 1 being all of it.", core.blocks.held_tokens / max(1, core.blocks.limit)
            ),
        }
        for name, (what, value) in values.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=["model_name", "engine"])
            gauge.add_metric(self._labels(), value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        meter = self._meter
        values = {
            "prompt_tokens": ("Tokens of prompts.", meter.prompt_tokens),
            "generation_tokens": ("Tokens written.", meter.new_tokens),
            "num_preemptions": ("Texts thrown out in the middle: none ever is.", 0),
            "prefix_cache_queries": ("Tokens of prompts that were looked up.", meter.prompt_tokens),
            "prefix_cache_hits": ("Those of them that had been read before.", meter.cached_tokens),
        }
        for name, (what, value) in values.items():
            yield self._counter(f"vllm:{name}", what, {(): value})
        ends = {(reason,): meter.finished[reason] for reason in REASONS}
        yield self._counter("vllm:request_success", "Texts that ended, by why.", ends, "finished_reason")

    def _counter(self, name: str, what: str, values: Mapping[L, float], *labels: str) -> Metric:
        counter = CounterMetricFamily(name, what, labels=["model_name", "engine", *labels])
        for own, value in values.items():
            counter.add_metric(self._labels(*own), value)
        return counter

    def _histograms(self) -> Iterator[Metric]:
        meter = self._meter
        values = {
            "time_to_first_token_seconds": ("From a request to its first token.", meter.first_token),
            "inter_token_latency_seconds": (
                "Between steps that brought tokens, each of which may bring several.", meter.between
            ),
            "request_time_per_output_token_seconds": ("Mean time between tokens of a text.", meter.per_token),
            "e2e_request_latency_seconds": ("From a request to its end.", meter.whole),
            "request_queue_time_seconds": ("Waiting for room.", meter.queue),
            "request_prefill_time_seconds": ("From room to the first token.", meter.prefill),
            "request_decode_time_seconds": ("From the first token to the last.", meter.decode),
            "request_prompt_tokens": ("Tokens of a prompt.", meter.prompts),
            "request_generation_tokens": ("Tokens of a text.", meter.texts),
            "iteration_tokens_total": (
                "Tokens of a step of the engine: written, and of prompts that it finished reading.", meter.iteration
            ),
        }
        for name, (what, histogram) in values.items():
            family = HistogramMetricFamily(f"vllm:{name}", what, labels=["model_name", "engine"])
            family.add_metric(self._labels(), buckets_of(histogram), histogram.sum)
            yield family

    def _drafts(self) -> Iterator[Metric]:
        drafters = list(self._meter.drafters.values())
        values = {
            "num_drafts": ("Steps with guesses.", sum(one.steps for one in drafters)),
            "num_draft_tokens": ("Guesses that were verified.", sum(one.drafted for one in drafters)),
            "num_accepted_tokens": ("Guesses that stayed.", sum(one.accepted for one in drafters)),
        }
        for name, (what, value) in values.items():
            yield self._counter(f"vllm:spec_decode_{name}", what, {(): value})
        by_depth: Count[tuple[str, ...]] = Count()
        for one in drafters:
            for depth, count in enumerate(one.by_depth):
                by_depth[(str(depth),)] += count
        what = "Guesses that stayed, by depth counted from 0."
        yield self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", what, by_depth, "position")

    def _own(self) -> Iterator[Metric]:
        meter = self._meter
        # Copies, because the engine's thread may add to them meanwhile.
        drafters, kinds = dict(meter.drafters), ("steps", "drafted", "accepted")
        by_drafter = {kind: {(name,): float(getattr(one, kind)) for name, one in drafters.items()} for kind in kinds}
        told = {"steps": "Steps with guesses", "drafted": "Guesses verified", "accepted": "Guesses that stayed"}
        for kind in kinds:
            yield self._counter(f"draftsmith_draft_{kind}", f"{told[kind]}, by drafter.", by_drafter[kind], "drafter")
        plans = {key: float(count) for key, count in dict(meter.plans).items()}
        yield self._counter("draftsmith_plan_steps", "Steps of texts by drafter and plan.", plans, "drafter", "plan")
        why = {(label,): float(meter.reasons[label]) for label in (*LABELS, UNTOLD)}
        yield self._counter("draftsmith_step_reasons", "Steps of texts by why they drafted so.", why, "reason")
        seconds = {(name.removesuffix("_s"),): value for name, value in dict(meter.seconds).items()}
        yield self._counter("draftsmith_seconds", "Seconds of texts that ended, by what took them.", seconds, "part")
        failures = {(name,): float(count) for name, count in meter.failures().items()}
        yield self._counter("draftsmith_drafter_failures", "Drafts that failed; the text went on.", failures, "drafter")
        yield self._counter("draftsmith_engine_steps", "Steps of the engine that brought something.", {(): meter.steps})


class HttpMetrics(Collector):
    """Requests by route, whatever their outcome."""

    def __init__(self) -> None:
        self._counts: Count[tuple[str, str, str]] = Count()
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def note(self, handler: str, method: str, status: int, began: float) -> None:
        """Count a request that began at a time of `time.monotonic`."""
        method = method if method in METHODS else "other"  # clients may invent any number of methods
        self._counts[handler, method, f"{status // 100}xx"] += 1
        self._seconds.setdefault((handler, method), Histogram(HTTP_SECONDS)).add(time.monotonic() - began)

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "http_requests", "Requests by route and status.", labels=["handler", "method", "status"]
        )
        for labels, count in list(self._counts.items()):
            counter.add_metric(list(labels), count)
        family = HistogramMetricFamily(
            "http_request_duration_seconds", "From a request to the end of its answer.", labels=["handler", "method"]
        )
        for pair, histogram in list(self._seconds.items()):
            family.add_metric(list(pair), buckets_of(histogram), histogram.sum)
        return [counter, family]


def buckets_of(histogram: Histogram) -> list[tuple[str, float]]:
    """Return how many values lie at or below each bound, as Prometheus wants them."""
    total, found = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        found.append((floatToGoString(bound), float(total)))
    return found


def registry_of(meter: Meter, http: HttpMetrics, health: Health) -> CollectorRegistry:
    """Return a registry of one server's metrics alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineMetrics(meter))
    registry.register(http)
    registry.register(HealthMetrics(health, (meter.model, ENGINE)))
    return registry
