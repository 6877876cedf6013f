"""How long refused clients are told to wait."""

from quire.engine.metrics.engine_metrics import LONGEST_S, RETRY_AFTER_S, WINDOW_S, AdmissionRate


def test_nothing_known_is_the_answer_of_all_errors() -> None:
    assert AdmissionRate().seconds_to_admit(1000, 100.0) == RETRY_AFTER_S


def test_steady_rate_is_extrapolated() -> None:
    rate = AdmissionRate()
    for second in range(20):
        rate.record(4, 100.0 + second)
    assert [rate.seconds_to_admit(num, 120.0) for num in (0, 1, 4, 40, 41, 10_000)] == [1, 1, 1, 10, 11, LONGEST_S]


def test_what_is_long_ago_does_not_count() -> None:
    rate = AdmissionRate()
    rate.record(1_000_000, 100.0)
    rate.record(3, 105.0 + WINDOW_S)
    assert rate.seconds_to_admit(6, 110.0 + WINDOW_S) == LONGEST_S
    assert rate.seconds_to_admit(1, 110.0 + WINDOW_S) == 10
    assert rate.seconds_to_admit(1, 200.0 + WINDOW_S) == LONGEST_S


def test_first_moments_are_taken_as_a_second() -> None:
    rate = AdmissionRate()
    rate.record(50, 100.0)
    assert rate.seconds_to_admit(100, 100.01) == 2


def test_steps_without_admissions_change_nothing() -> None:
    rate = AdmissionRate()
    rate.record(0, 100.0)
    assert rate.seconds_to_admit(1, 150.0) == RETRY_AFTER_S


def test_time_without_anybody_waiting_is_forgotten() -> None:
    rate = AdmissionRate()
    rate.record(1, 100.0)
    rate.rest()
    rate.record(10, 125.0)
    assert rate.seconds_to_admit(10, 125.5) == 1


def test_rate_starts_anew_only_when_all_engines_are_idle() -> None:
    rate = AdmissionRate()
    rate.record(10, 100.0, engine=0)
    rate.record(10, 101.0, engine=1)
    rate.rest(0)
    assert rate.seconds_to_admit(10, 102.0) == 1
    rate.rest(1)
    assert rate.seconds_to_admit(10, 102.0) == RETRY_AFTER_S


def test_any_number_of_steps_takes_little_memory() -> None:
    rate = AdmissionRate()
    for step in range(100_000):
        rate.record(1, 100.0 + step / 1000)
    assert len(rate._by_second) == WINDOW_S
    assert rate.seconds_to_admit(10_000, 200.0) in (10, 11)    # the oldest second is only partly inside
