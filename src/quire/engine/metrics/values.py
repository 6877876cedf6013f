"""Metric values: metrics as plain objects, for Python. Names of classes and fields are vLLM's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family


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
