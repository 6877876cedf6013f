"""How much gets done per second, of late."""

import pytest

from quire.execution.step_timer import Rate


def test_nothing_is_known_before_the_first_measurement() -> None:
    assert Rate().per_s is None


def test_one_measurement_is_the_rate() -> None:
    rate = Rate()
    rate.add(6, 2.0)
    assert rate.per_s == 3


def test_large_amounts_weigh_more() -> None:
    rate = Rate()
    rate.add(1, 1.0)
    rate.add(1000, 1.0)
    assert rate.per_s == pytest.approx(1000.9 / 1.9)


def test_rate_follows_what_it_measures() -> None:
    rate = Rate()
    for _ in range(50):
        rate.add(10, 1.0)
    for _ in range(30):
        rate.add(10, 10.0)
    assert rate.per_s == pytest.approx(1.0, rel=0.1)


def test_no_time_at_all_is_no_rate() -> None:
    rate = Rate()
    rate.add(5, 0.0)
    assert rate.per_s is None
