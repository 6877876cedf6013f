"""The search for the highest rate, over servers that are a rule: which rates meet the limits."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_lab.sim.rate_search import RateSearch


def searched(
    meets: Callable[[float], bool], start: float = 1.0, lowest: float = 0.25, highest: float = 100.0
) -> tuple[float | None, list[float], RateSearch]:
    """Return the rate found, the rates tried in order, and the search."""
    search = RateSearch(start, precision=0.05, lowest=lowest, highest=highest)
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.record(rate, is_met=meets(rate))
    return search.best, tried, search


def test_doubles_then_bisects() -> None:
    found, tried, search = searched(lambda rate: rate <= 6.6)
    assert tried[:4] == [1.0, 2.0, 4.0, 8.0]
    assert tried[4:] == [6.0, 7.0, 6.5, 6.75]
    assert found == search.best == 6.5
    assert search.missed == 6.75


def test_goes_down_where_the_start_is_too_high() -> None:
    found, tried, _ = searched(lambda rate: rate <= 0.6, start=4.0)
    assert tried[:4] == [4.0, 2.0, 1.0, 0.5]
    assert found == pytest.approx(0.6, rel=0.06)


def test_server_that_cannot_meet_the_limits_at_any_rate_is_given_up() -> None:
    found, tried, search = searched(lambda _: False, start=1.5)
    assert found is None
    assert tried == [1.5, 0.75, 0.375, 0.25]
    assert search.missed == 0.25


def test_server_that_takes_any_rate_ends_the_search_at_its_upper_bound() -> None:
    found, tried, search = searched(lambda _: True)
    assert found == tried[-1] == 100.0
    assert search.missed is None


def test_start_out_of_bounds_is_moved_into_them() -> None:
    assert searched(lambda _: False, start=0.1)[1] == [0.25]
    assert searched(lambda _: True, start=900.0)[1] == [100.0]


@given(capacity=st.floats(0.25, 100.0), start=st.floats(0.01, 1000.0))
def test_found_rate_is_within_the_precision_below_the_capacity(capacity: float, start: float) -> None:
    found, tried, _ = searched(lambda rate: rate <= capacity, start)
    assert found is not None
    assert found <= capacity
    assert found * 1.05 >= capacity
    assert len(tried) < 25
