"""Forecast of the time to a first token, for scripted reports of an engine."""

import math

import pytest

from quire.core.outputs import KVStats, RequestMetrics
from quire.core.sampling_params import SamplingParams
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.engine.forecast import Forecast
from quire.engine.messages import EngineState
from quire.engine.output_processor import FinishedRequest
from quire.engine.queued_requests import Asked, QueuedRequests
from support.scheduling import make_request

TIMES = StepTimes(step_s=0.01, token_s=0.001, attended_s=0.0, context_s=0.0)
OWN = chunk_work(0, 100)


def queued(*prompts: int) -> QueuedRequests:
    requests = QueuedRequests()
    for number, length in enumerate(prompts):
        requests.add(make_request(number, [0] * length, SamplingParams()))
    return requests


def forecast(target_s: float = math.inf) -> Forecast:
    return Forecast(1000, 4, target_s, "fcfs")


def test_nothing_is_refused_by_an_engine_that_has_measured_nothing() -> None:
    assert forecast().first_token_s(EngineState(4, 9, 0), queued(10**6), Asked(OWN)) == 0.0


def test_prompts_before_and_in_progress_count_with_their_own_steps() -> None:
    state = EngineState(0, 0, 0, step_times=TIMES)
    assert forecast().first_token_s(state, queued(), Asked(OWN)) == pytest.approx(0.11)
    assert forecast().first_token_s(state, queued(500, 300), Asked(OWN)) == pytest.approx(0.91)
    begun = EngineState(0, 0, 0, step_times=TIMES, prompts_left=StepWork(1000))
    assert forecast().first_token_s(begun, queued(500, 300), Asked(OWN)) == pytest.approx(1.9 + 2 * 0.01)


def test_decodes_take_their_part_of_each_step_under_the_target() -> None:
    decodes = EngineState(2, 0, 0, num_running_seqs=2, step_times=TIMES)    # 0.012 s a step
    assert forecast().first_token_s(decodes, queued(), Asked(OWN)) == pytest.approx(0.1 + 0.012)
    assert forecast(0.032).first_token_s(decodes, queued(), Asked(OWN)) == pytest.approx(0.1 + 5 * 0.012)
    unmet = forecast(0.004).first_token_s(decodes, queued(), Asked(OWN))          # a chunk in every third step
    assert unmet == pytest.approx(0.1 + 27 * 0.012)


def test_target_that_only_a_margin_misses_leaves_half_of_the_rest_to_prompts() -> None:
    decodes = EngineState(2, 0, 0, num_running_seqs=2, step_times=TIMES._replace(margin=1.5))
    assert forecast(0.016).first_token_s(decodes, queued(), Asked(OWN)) == pytest.approx(0.1 + 50 * 0.012)


def test_what_the_cache_is_likely_to_have_is_not_computed() -> None:
    kv = KVStats(16, 100, 0, 0, 100, 0, 0, 0, prefix_queries_tokens=1000, prefix_hits_tokens=750)
    state = EngineState(0, 0, 0, kv=kv, step_times=TIMES)
    assert forecast().first_token_s(state, queued(400), Asked(OWN)) == pytest.approx(0.01 + 0.125)
    known = Asked(OWN, knows_cached=True)
    assert forecast().first_token_s(state, queued(400), known) == pytest.approx(0.01 + 0.2)


def test_seats_become_free_as_answers_end() -> None:
    full = EngineState(4, 3, 0, num_running_seqs=4, waits_for="max_num_seqs", step_times=TIMES)
    one = forecast()
    alone_s = one.first_token_s(full, queued(1, 1, 1), Asked(OWN))
    times = [RequestMetrics(0.0, first_scheduled_s=10.0, finished_s=10.0 + held_s) for held_s in (6.0, 10.0)]
    one.record_ended([FinishedRequest(each, 1, 1, ["stop"]) for each in times])
    assert alone_s < 0.2
    assert one.first_token_s(full, queued(1, 1, 1), Asked(OWN)) == pytest.approx(3.5 * 8 / 4 + 0.1 + 0.014)


def test_prices_of_a_few_slow_steps_are_no_price_of_a_queue() -> None:
    one, state = forecast(), EngineState(0, 0, 0, step_times=TIMES)
    one.record_times(TIMES)
    usual_s = one.first_token_s(state, queued(), Asked(OWN))
    one.record_times(StepTimes(*(10 * each for each in TIMES)))
    assert usual_s < one.first_token_s(state, queued(), Asked(OWN)) < 1.2 * usual_s
    for _ in range(500):
        one.record_times(StepTimes(*(10 * each for each in TIMES)))
    assert one.first_token_s(state, queued(), Asked(OWN)) == pytest.approx(10 * usual_s, rel=0.01)
