"""Limits, and the requests that meet all of them."""

import pytest

from quire.core.errors import ConfigError
from quire_lab.bench.bench_flags import LimitFlags
from quire_lab.bench.diagnosis import LatencyLimits
from quire_lab.sim.statistics import Timeline

TIMELINE = Timeline(0.0, [1.0, 1.25, 2.0], num_tokens=6)  # TTFT 1, gaps 0.25 and 0.75, TPOT 0.2, end to end 2


@pytest.mark.parametrize(
    ("limits", "is_met"),
    [
        (LatencyLimits(), True),
        (LatencyLimits(ttft_s=1.0), True),
        (LatencyLimits(ttft_s=0.99), False),
        (LatencyLimits(itl_s=0.75), True),
        (LatencyLimits(itl_s=0.5), False),
        (LatencyLimits(tpot_s=0.2), True),
        (LatencyLimits(tpot_s=0.19), False),
        (LatencyLimits(e2e_s=2.0), True),
        (LatencyLimits(e2e_s=1.9), False),
        (LatencyLimits(ttft_s=1.0, itl_s=0.75, tpot_s=0.2, e2e_s=2.0), True),
        (LatencyLimits(ttft_s=1.0, itl_s=0.75, tpot_s=0.2, e2e_s=1.0), False),
    ],
)
def test_request_is_good_when_it_meets_every_limit(limits: LatencyLimits, is_met: bool) -> None:
    assert limits.are_met_by(TIMELINE) is is_met


def test_single_token_has_no_gaps_to_miss() -> None:
    assert LatencyLimits(itl_s=0.001, tpot_s=0.001).are_met_by(Timeline(0.0, [5.0]))


def test_good_requests_are_counted() -> None:
    timelines = [Timeline(0.0, [second]) for second in (0.5, 1.5, 1.0)]
    assert LatencyLimits(ttft_s=1.0).num_met(timelines) == 2


def test_given_limits_are_those_that_are_set() -> None:
    assert LatencyLimits(tpot_s=0.05, e2e_s=9.0).given == {"tpot_s": 0.05, "e2e_s": 9.0}


def test_flags_and_goodput_name_the_same_limits() -> None:
    named = LimitFlags((("ttft", 500.0), ("tpot", 50.0), ("e2el", 3000.0), ("itl", 0.0)))
    assert named.limits == LatencyLimits(ttft_s=0.5, itl_s=0.0, tpot_s=0.05, e2e_s=3.0)
    flags = LimitFlags(ttft_limit_ms=500, itl_limit_ms=60, tpot_limit_ms=50, e2e_limit_ms=3000)
    assert flags.limits == LatencyLimits(ttft_s=0.5, itl_s=0.06, tpot_s=0.05, e2e_s=3.0)
    assert LimitFlags((("e2el", 3000.0),), ttft_limit_ms=500).limits == LatencyLimits(ttft_s=0.5, e2e_s=3.0)


def test_limit_given_in_both_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="goodput has e2el:9, e2e-limit-ms is 7; give one"):
        assert LimitFlags((("e2el", 9.0),), e2e_limit_ms=7).limits
