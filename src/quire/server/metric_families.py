"""Makers of Prometheus' metric families: a name, what it means, and samples with labels.

Families are made anew for each page from plain numbers. So counting costs no more than an addition, and no page has the
`_created` series of prometheus-client's own counters.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Labels = dict[str, str]
Sample = tuple[Labels, float]  # all samples of a family have the same labels in the same order


def gauge(name: str, documentation: str, *samples: Sample) -> GaugeMetricFamily:
    """Return a family of values that go up and down."""
    family = GaugeMetricFamily(name, documentation, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, documentation: str, *samples: Sample) -> CounterMetricFamily:
    """Return a family of values that only grow; `name` ends with _total."""
    family = CounterMetricFamily(name, documentation, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def by(label: str, values: Mapping[str, float], others: Labels | None = None) -> Iterator[Sample]:
    """Yield one sample per value that `label` may have."""
    return (((others or {}) | {label: name}, value) for name, value in values.items())


class Histogram:
    """How many observed values fell into each bucket. A bucket takes what is at most its bound; the last takes all."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._bound_labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._bound_labels)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take down a value that was seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Labels) -> HistogramMetricFamily:
        """Return the family; its counts are cumulative, as Prometheus wants them."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(labels))
        buckets = list(zip(self._bound_labels, accumulate(self._counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family
