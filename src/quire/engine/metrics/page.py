"""Counters, gauges and histograms in Prometheus' format; docs/metrics.md explains each one.

Where vLLM has a metric, its name, meaning and labels model_name and engine are used, so that its dashboards and alerts
work. Every page has all series, so that a rate sees the first event. No page has the `_created` series of
prometheus-client's own counters.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.core.kv_events import KVEventsConfig
from quire.core.outputs import KVStats
from quire.engine.metrics.energy import EnergyCollector
from quire.engine.metrics.engine_metrics import AdmissionRate, EngineMetrics, NumTokens, by, counter
from quire.engine.metrics.step_ring import StepRing
from quire.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its labels. Names of counters are without the `_total` of Prometheus' page."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Counts of values up to each bound, that is the key; the last is `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(families: Iterable[Family]) -> Iterator[Metric]:
    """Yield the metrics of families: one for each set of labels."""
    for family in families:
        if family.type == "histogram":
            yield from _histograms(family)
            continue
        kind = Counter if family.type == "counter" else Gauge
        for sample in family.samples:
            yield kind(family.name, dict(sample.labels), sample.value)


def _histograms(family: Family) -> Iterator[Histogram]:
    """Yield the histograms of a family, one for each set of labels; the samples of each follow one another."""
    buckets = dict[str, int]()
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            yield Histogram(family.name, dict(sample.labels), buckets["+Inf"], sample.value, buckets)
            buckets = {}


# Codes of the errors that clients get.
REFUSALS = ("server_overloaded", "shutting_down", "asleep", "key_limit", "deadline_unmeetable")
QUEUE_BOUNDS = ("max_num_queued_reqs", "max_num_queued_tokens")  # vLLM's names of max_queued_requests and _tokens
SESSION_CALLS = ("create", "extend", "fork", "save", "restore")
FAILURES = ("request_failed", "engine_unhealthy")
OLDER_NAMES = {  # names of the same numbers in vLLM up to 0.11, which dashboards still ask for
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
_DEFAULTS = EngineOptions()
_SERVER = {"engine": "0"}  # label of calls that reached no engine: one value, so that sums over engines are right


class Metrics(Collector):
    """Metrics of a server and its engines, each of which reports to one of `engines`. Lives on the event loop."""

    def __init__(
        self, model_name: str, kv: KVStats | None = None, num_engines: int = 1, options: EngineOptions = _DEFAULTS
    ) -> None:
        self.model_name, self._admissions = model_name, AdmissionRate()
        self.engines: Sequence[EngineMetrics] = [
            EngineMetrics(self._admissions, number, model_name, options, kv) for number in range(num_engines)
        ]
        self._num_refused = dict.fromkeys(REFUSALS, 0)
        self._num_queue_full = dict.fromkeys(QUEUE_BOUNDS, 0)
        self._num_failed = dict.fromkeys(FAILURES, 0)
        self._num_session_calls = dict.fromkeys(SESSION_CALLS, 0)
        self._num_spans_dropped, self._counting_spans = 0, Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def keep_steps(self) -> None:
        """Keep the latest steps of each engine from now on, for `GET /debug/top`."""
        numbers = count()
        for engine in self.engines:
            engine.steps = StepRing(numbers)

    def open_events(self, config: KVEventsConfig) -> None:
        """Publish what is in the cache of each engine from now on. ConfigError if an address is taken."""
        from quire.engine.event_publisher import KVEventPublisher  # noqa: PLC0415 (needs an optional package)

        for number, engine in enumerate(self.engines):
            engine.events = KVEventPublisher(config, number)

    def close_events(self) -> None:
        """Tell that no block can be found, and close the publishers, after up to a second each. Idempotent."""
        for engine in self.engines:
            if engine.events is not None:
                engine.events.close()

    def measure_energy(self) -> None:
        """Have the page tell the energy of the machine from now on, where the system tells it."""
        self._registry.register(EnergyCollector())

    def refused(self, reason: str) -> None:
        """Count a call that was not admitted, for one of REFUSALS."""
        self._num_refused[reason] += 1

    def queue_full(self, bound: str) -> None:
        """Count a call that was not admitted because one of QUEUE_BOUNDS was reached."""
        self._num_queue_full[bound] += 1
        self.refused("server_overloaded")

    def failed(self, reason: str) -> None:
        """Count a call that failed through no fault of its own, for one of FAILURES."""
        self._num_failed[reason] += 1

    def session_moved(self, call: str) -> None:
        """Count a call that has made, changed or saved a session, one of SESSION_CALLS."""
        self._num_session_calls[call] += 1

    def spans_dropped(self, number: int) -> None:
        """Count spans that were not sent, from any thread."""
        with self._counting_spans:
            self._num_spans_dropped += number

    def retry_after_s(self, num_queued: int) -> int:
        """Return the seconds after which a refused client may retry, from the rate at which requests leave the queue.

        By then all requests that wait now will have left the queue: earlier, all refused clients would compete for one
        place.
        """
        return self._admissions.seconds_to_admit(num_queued, time.monotonic())

    def num_tokens(self) -> NumTokens:
        """Return the tokens since start, of all engines."""
        counted = [engine.num_tokens for engine in self.engines]
        return NumTokens(sum(each.prompt for each in counted), sum(each.output for each in counted))

    def num_requests(self) -> tuple[int, int]:
        """Return how many requests run and wait, in all engines, as far as they have reported."""
        loads = [engine.load for engine in self.engines]
        return sum(running for running, _ in loads), sum(waiting for _, waiting in loads)

    def exposition(self, num_queued: Sequence[int] = ()) -> tuple[bytes, str]:
        """Return the page and its content type. `num_queued`: by engine, requests sent to it that have not run yet."""
        for engine, number in zip(self.engines, num_queued, strict=False):
            engine.num_queued = number
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def values(self) -> list[Metric]:
        """Return all metrics of the page but those of the process, as objects."""
        return list(metric_values(self.collect()))

    def collect(self) -> Iterator[Family]:
        """Yield all families of the page but those of the process, some under an older name too."""
        for family in self._families():
            yield family
            if family.name in OLDER_NAMES:
                yield _renamed(family, OLDER_NAMES[family.name])

    def _families(self) -> Iterator[Family]:
        """Yield the families of all engines, each with the samples of all, and those of calls."""
        for first, *others in zip(*(engine.families() for engine in self.engines), strict=True):
            for other in others:
                first.samples += other.samples
            yield first
        model = {"model_name": self.model_name} | _SERVER
        refused = by("reason", self._num_refused, _SERVER)
        yield counter("quire:requests_refused_total", "Calls not admitted, by code.", *refused)
        rejected = by("reason", self._num_queue_full, model)
        yield counter("vllm:admission_rejections_total", "Calls refused by a bound of the queue.", *rejected)
        failed = by("reason", self._num_failed, _SERVER)
        yield counter("quire:requests_failed_total", "Calls that failed, by code.", *failed)
        sessions = by("call", self._num_session_calls, _SERVER)
        yield counter("quire:session_calls_total", "Calls that made, changed or saved sessions.", *sessions)
        dropped = _SERVER, self._num_spans_dropped
        yield counter("quire:trace_spans_dropped_total", "Spans that were not sent.", dropped)


def _renamed(family: Family, name: str) -> Family:
    """Return a family with the same samples under another name."""
    renamed = Family(name, f"Older name of {family.name}.", family.type)
    renamed.samples = [each._replace(name=name + each.name.removeprefix(family.name)) for each in family.samples]
    return renamed
