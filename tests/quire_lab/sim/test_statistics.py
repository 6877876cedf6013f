"""Figures from timelines, checked by hand."""

import pytest

from quire_lab.sim.statistics import Distribution, Spread, Timeline, distribution, latencies, spread


def test_timeline_of_several_tokens() -> None:
    timeline = Timeline(sent_s=1.0, token_times_s=[1.5, 1.75, 2.5])
    assert timeline.ttft_s == 0.5
    assert timeline.itl_s == [0.25, 0.75]
    assert timeline.tpot_s == 0.5
    assert timeline.e2e_s == 1.5


def test_single_token_has_no_time_per_further_token() -> None:
    timeline = Timeline(sent_s=0.0, token_times_s=[2.0])
    assert (timeline.ttft_s, timeline.e2e_s, timeline.tpot_s, timeline.itl_s) == (2.0, 2.0, None, [])


def test_tokens_that_come_together_count_each_in_tpot_and_once_in_itl() -> None:
    timeline = Timeline(sent_s=0.0, token_times_s=[1.0, 2.0, 3.0], num_tokens=9)
    assert timeline.tpot_s == 2.0 / 8
    assert timeline.itl_s == [1.0, 1.0]
    assert Timeline(0.0, [1.0], num_tokens=0).tpot_s is None


def test_distribution_is_linear_between_neighbours() -> None:
    assert distribution([float(i) for i in range(101)]) == Distribution(50.0, 50.0, 95.0, 99.0)
    assert distribution([0.0, 1.0]) == pytest.approx((0.5, 0.5, 0.95, 0.99))


def test_distribution_of_one() -> None:
    assert distribution([3.0]) == Distribution(3.0, 3.0, 3.0, 3.0)


def test_spread_is_median_and_extremes() -> None:
    assert spread([3.0, 1.0, 8.0]) == Spread(median=3.0, low=1.0, high=8.0)


def test_gaps_are_pooled_over_tokens_and_tpot_over_requests() -> None:
    slow_long = Timeline(0.0, [1.0, 3.0, 5.0, 7.0])  # three gaps of 2 s
    fast_short = Timeline(0.0, [1.0, 1.5])           # one gap of 0.5 s
    found = latencies([slow_long, fast_short])
    assert found["itl_s"].mean == (3 * 2.0 + 0.5) / 4
    assert found["tpot_s"].mean == (2.0 + 0.5) / 2
    assert found["e2e_s"].p50 == (7.0 + 1.5) / 2


def test_answers_of_one_token_have_no_gaps_to_report() -> None:
    assert set(latencies([Timeline(0.0, [1.0])])) == {"ttft_s", "e2e_s"}
