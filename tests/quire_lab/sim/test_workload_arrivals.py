"""When requests are due: the rate and the burstiness asked for, from a seed."""

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire_lab.sim.workloads import Schedule, WorkItem, poisson_arrivals, trace_arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(poisson_arrivals(20_001, rate=8.0, burstiness=burstiness, seed=1))
    assert gaps.mean() == pytest.approx(1 / 8)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_few_requests_have_the_rate_asked_for_too() -> None:
    assert [poisson_arrivals(10, 3.0, 1.0, seed)[-1] for seed in range(5)] == [pytest.approx(9 / 3.0)] * 5
    assert poisson_arrivals(1, 3.0, 1.0, seed=0) == [0.0]


def test_first_request_is_due_at_once_and_none_before_the_last() -> None:
    times = poisson_arrivals(100, rate=2.0, burstiness=1.0, seed=0)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) == 100


def test_arrivals_follow_their_seed() -> None:
    assert poisson_arrivals(5, 1.0, 1.0, seed=3) == poisson_arrivals(5, 1.0, 1.0, seed=3)
    assert poisson_arrivals(5, 1.0, 1.0, seed=3) != poisson_arrivals(5, 1.0, 1.0, seed=4)


def test_trace_comes_when_it_came() -> None:
    assert trace_arrivals([WorkItem([1], 1, 0.0), WorkItem([1], 1, 2.5)]) == [0.0, 2.5]


def test_workload_without_times_is_no_trace() -> None:
    with pytest.raises(ConfigError, match="arrival times"):
        trace_arrivals([WorkItem([1], 1, 0.0), WorkItem([1], 1)])


def test_offered_rate_is_over_the_gaps() -> None:
    assert Schedule([0.0, 1.0, 2.0, 4.0], max_open=9).offered_rps == 3 / 4


@pytest.mark.parametrize("due_s", [None, [0.0], [0.0, 0.0, 0.0]], ids=["closed loop", "one", "burst"])
def test_load_without_gaps_offers_no_rate(due_s: list[float] | None) -> None:
    assert Schedule(due_s, max_open=9).offered_rps is None
