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
            yield _histogram(family)
            continue
        kind = Counter if family.type == "counter" else Gauge
        for sample in family.samples:
            yield kind(family.name, dict(sample.labels), sample.value)


def _histogram(family: Family) -> Histogram:
    """Return the histogram of a family, which has one set of labels."""
    buckets, total = dict[str, int](), 0.0
    labels: dict[str, str] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = sample.value
    return Histogram(family.name, labels, buckets["+Inf"], total, buckets)
