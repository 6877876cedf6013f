"""Forecast of the time to a first token, for scripted reports of an engine."""

import math
from collections.abc import Sequence

import pytest

from quire.core.deltas import Admission, FinishReason, SequenceDelta, WaitReason
from quire.core.outputs import KVStats
from quire.core.sampling_params import SamplingParams
from quire.core.step_times import StepTimes, StepTiming, StepWork, chunk_work
from quire.engine.messages import EngineState, Stepped
from quire.engine.processes.forecast import FRESH_S, LATE_LONGER, MOST_OFF, Asked, Forecast, QueuedRequests
from support.scheduling import make_request

TIMES = StepTimes(step_s=0.01, token_s=0.001, attended_s=0.0, context_s=0.0, sample_s=0.001)
STEPS = StepTimes(step_s=1.0, token_s=0.0, attended_s=0.0, context_s=0.0, sample_s=0.0)
OWN = chunk_work(0, 100)


def queued(*prompts: int) -> QueuedRequests:
    requests = QueuedRequests()
    for number, length in enumerate(prompts):
        requests.add(make_request(number, [0] * length, SamplingParams()))
    return requests


def forecast(target_s: float = math.inf) -> Forecast:
    return Forecast(1000, 4, target_s, "fcfs")


class Run:
    """A forecast that is fed with the reports of an engine, one step after the other."""

    def __init__(self, step_s: float = 0.0, host_s: float = 0.0, times: StepTimes = STEPS) -> None:
        self.forecast, self.now_s, self.times = forecast(), 0.0, times
        self._step_s, self._host_s = step_s, host_s

    def send(self, request_id: int, max_tokens: int, n: int = 1, predicted_s: float = 0.0) -> None:
        request = make_request(request_id, [0], SamplingParams(n=n, max_tokens=max_tokens))
        self.forecast.record_sent(request, predicted_s, self.now_s)

    def step(
        self, *extended: int, admitted: tuple[int, ...] = (), ended: tuple[int, ...] = (),
        preempted: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        reasons: dict[int, FinishReason] = dict.fromkeys(ended, "stop")
        started_s, self.now_s = self.now_s, self.now_s + self._step_s
        step = Stepped(
            started_s, 1, [Admission(each, 0, 0, (), 0, 0) for each in admitted],
            [SequenceDelta(each, 0, [7], finish_reason=reasons.get(each)) for each in extended],
            EngineState(1, 0, 0, step_times=self.times), list(preempted), StepTiming("decode", self._step_s),
        )  # fmt: skip
        self.forecast.record_step(step, self.now_s)
        self.now_s += self._host_s

    def answer(self, request_id: int, num_steps: int, max_tokens: int = 1000) -> None:
        """Run an answer of so many steps alone."""
        self.send(request_id, max_tokens)
        for number in range(num_steps):
            is_last = number == num_steps - 1
            self.step(request_id, admitted=() if number else (request_id,), ended=(request_id,) if is_last else ())

    def steps_to_first_token(self, num_waiting: int, num: int = 4, waits_for: WaitReason = "max_num_seqs") -> float:
        """Return in units of a step of all decodes; own and others' prompts are free."""
        state = EngineState(num, 0, 0, num_running_seqs=num, waits_for=waits_for, step_times=STEPS)
        return self.forecast.first_token_s(state, queued(*[1] * num_waiting), Asked(chunk_work(0, 1)), self.now_s)


def test_nothing_is_refused_by_an_engine_that_has_measured_nothing() -> None:
    assert forecast().first_token_s(EngineState(4, 9, 0), queued(10**6), Asked(OWN), 0.0) == 0.0


def test_prompts_before_and_in_progress_count_with_their_own_steps() -> None:
    state = EngineState(0, 0, 0, step_times=TIMES)
    assert forecast().first_token_s(state, queued(), Asked(OWN), 0.0) == pytest.approx(0.11)
    assert forecast().first_token_s(state, queued(500, 300), Asked(OWN), 0.0) == pytest.approx(0.91)
    begun = EngineState(0, 0, 0, step_times=TIMES, prompts_left=StepWork(1000))
    assert forecast().first_token_s(begun, queued(500, 300), Asked(OWN), 0.0) == pytest.approx(1.9 + 2 * 0.01)


def test_decodes_take_their_part_of_each_step_under_the_target() -> None:
    decodes = EngineState(2, 0, 0, num_running_seqs=2, step_times=TIMES)    # 0.012 s a step
    assert forecast().first_token_s(decodes, queued(), Asked(OWN), 0.0) == pytest.approx(0.1 + 0.012)
    assert forecast(0.032).first_token_s(decodes, queued(), Asked(OWN), 0.0) == pytest.approx(0.1 + 5 * 0.012)
    unmet = forecast(0.004).first_token_s(decodes, queued(), Asked(OWN), 0.0)          # a chunk in every third step
    assert unmet == pytest.approx(0.1 + 27 * 0.012)


def test_target_that_only_a_margin_misses_leaves_half_of_the_rest_to_prompts() -> None:
    decodes = EngineState(2, 0, 0, num_running_seqs=2, step_times=TIMES._replace(margin=1.5))
    assert forecast(0.016).first_token_s(decodes, queued(), Asked(OWN), 0.0) == pytest.approx(0.1 + 50 * 0.012)


def test_what_the_cache_is_likely_to_have_is_not_computed() -> None:
    kv = KVStats(16, 100, 0, 0, 100, 0, 0, 0, prefix_queries_tokens=1000, prefix_hits_tokens=750)
    state = EngineState(0, 0, 0, kv=kv, step_times=TIMES)
    assert forecast().first_token_s(state, queued(400), Asked(OWN), 0.0) == pytest.approx(0.01 + 0.125)
    known = Asked(OWN, knows_cached=True)
    assert forecast().first_token_s(state, queued(400), known, 0.0) == pytest.approx(0.01 + 0.2)


def full_run() -> Run:
    """Answers of 10 and 30 steps have ended; four run, 2, 6, 12 and 40 steps long so far."""
    run = Run()
    run.answer(100, 10)
    run.answer(101, 30)
    for request_id, max_tokens in ((0, 1000), (1, 1000), (2, 20), (3, 1000)):
        run.send(request_id, max_tokens)
    lengths = {3: 40, 2: 12, 1: 6, 0: 2}
    for number in range(40):
        begun = [each for each, length in lengths.items() if number >= 40 - length]
        run.step(*begun, admitted=tuple(each for each in begun if number == 40 - lengths[each]))
    return run


def test_seats_are_free_after_the_steps_that_answers_are_likely_to_have_left() -> None:
    run = full_run()
    # left: 20 - 2 and 20 - 6, of both; 20 - 12 by its max_tokens; the longest has none to compare with: 20 again
    assert [run.steps_to_first_token(num) for num in range(4)] == pytest.approx([9, 15, 19, 21])
    assert [run.steps_to_first_token(num) for num in (4, 8)] == pytest.approx([9 + 20, 9 + 40])


def test_free_seats_are_taken_first_and_left_again() -> None:
    run = full_run()
    run.step(3, ended=(3,))
    run.forecast.forget(2)
    assert [run.steps_to_first_token(num, 2) for num in range(2)] == [1, 1]
    mean = (10 + 30 + 41) / 3
    assert run.steps_to_first_token(4, 2) == pytest.approx(1 + mean)
    blocked = [run.steps_to_first_token(num, 2, "kv_blocks") for num in range(2)]
    assert blocked == pytest.approx([1 + mean - 6, 1 + mean - 2])


def test_preempted_request_holds_no_seat_and_an_answer_of_several_ends_with_its_last() -> None:
    run = Run()
    run.answer(100, 10)
    run.send(0, 1000)
    run.send(1, 1000, n=2)
    run.step(0, 1, admitted=(0, 1))
    run.step(1, preempted=(0,), ended=(1,))
    assert run.steps_to_first_token(0, 4) == pytest.approx(1 + 10 - 2)
    run.step(1, ended=(1,))
    assert run.steps_to_first_token(0, 4) == 1          # no seat is known of: nothing is refused for it


def test_queue_of_an_idle_engine_waits_for_seats_too() -> None:
    run = Run()
    run.answer(100, 10)
    idle = EngineState(0, 0, 0, step_times=STEPS)
    seconds = [run.forecast.first_token_s(idle, queued(*[1] * num), Asked(OWN), 0.0) for num in (3, 4, 9)]
    assert seconds == pytest.approx([1, 11, 21])


def test_time_of_the_host_between_steps_counts_with_each_step() -> None:
    run = Run(0.01, 0.005, TIMES)
    for number in range(8):
        run.answer(number, 50)
    state = EngineState(0, 0, 0, step_times=TIMES)
    assert run.forecast.first_token_s(state, queued(), Asked(OWN), run.now_s) == pytest.approx(0.115, abs=1e-4)


def test_time_since_the_last_report_has_passed() -> None:
    run = full_run()
    at_once_s = run.steps_to_first_token(2)
    run.now_s += 2.5
    assert run.steps_to_first_token(2) == pytest.approx(at_once_s - 2.5)
    run.now_s += 1000.0
    assert run.steps_to_first_token(2) == 1             # at least the own step


def measured(ratios: list[float], asked_s: Sequence[float] = ()) -> Run:
    """Requests were predicted to begin after 1 s, and began after so many. `asked_s`: their deadlines, and others."""
    run = Run()
    for within_s in asked_s:
        run.forecast.record_asked(1.0, within_s)
    for number, ratio in enumerate(ratios):
        run.send(number, 10, predicted_s=1.0)
        run.now_s += ratio
        run.step(number, admitted=(number,), ended=(number,))
    return run


ERRORS = [0.5] * 40 + [1.0] * 40 + [1.5] * 42 + [3.5] * 6     # measured / predicted: median 1, nine of ten below 1.5


def test_correction_is_the_median_error_where_no_deadline_is_close_to_the_wait() -> None:
    for asked_s in ([], [0.1], [4.0] * 20, [0.1, 0.5, 4.0, 20.0] * 30):
        run = measured([9.0] * 50 + ERRORS, asked_s)
        assert run.forecast.correct(2.0, run.now_s) == pytest.approx(2.0)
    assert measured([9.0] * 3).forecast.correct(2.0, 27.0) == 2.0           # too few
    assert measured([50.0] * 140).forecast.correct(2.0, 7000.0) == 2.0 * MOST_OFF


def test_correction_keeps_nineteen_of_twenty_accepted_requests_in_time() -> None:
    run = measured(ERRORS, [0.9, 1.2, 1.4, 1.6] * 30)       # deadlines from 1.2 s on: a third is late, or one in 20
    assert run.forecast.correct(1.0, run.now_s) == pytest.approx(1.5)
    run = measured(ERRORS, [1.1, 1.2, 1.3, 1.4, 0.9] + [4.0] * 20)      # three times a third late, of 23, is one in 20
    assert run.forecast.correct(1.0, run.now_s) == pytest.approx(1.2)


def test_request_that_was_late_would_have_taken_longer_than_its_deadline() -> None:
    run = Run()
    for number in range(8):
        run.send(number, 10, predicted_s=1.0)
        run.now_s += 2.0
        late = SequenceDelta(number, 0, [], error="late", is_late=True)
        state = EngineState(1, 0, 0, step_times=STEPS)
        run.forecast.record_step(Stepped(run.now_s, 1, [], [late], state), run.now_s)
    assert run.forecast.correct(1.0, run.now_s) == 2.0 * LATE_LONGER
    assert len(run.forecast) == 0


def test_correction_that_nothing_confirms_is_dropped() -> None:
    run = measured([3.0] * 40)
    assert run.forecast.correct(1.0, run.now_s + FRESH_S) == 3.0
    assert run.forecast.correct(1.0, run.now_s + FRESH_S + 1.0) == 1.0


def test_long_waits_correct_more_than_short_ones() -> None:
    run = measured([1.0] * 20)
    for number in range(100, 110):
        run.send(number, 10, predicted_s=0.01)
        run.now_s += 0.05
        run.step(number, admitted=(number,), ended=(number,))
    assert run.forecast.correct(1.0, run.now_s) == 1.0


def test_prices_of_a_few_slow_steps_are_no_price_of_a_queue() -> None:
    run, state = Run(times=TIMES), EngineState(0, 0, 0, step_times=TIMES)

    def seconds() -> float:
        return run.forecast.first_token_s(state, queued(), Asked(OWN), run.now_s)

    run.step()
    usual_s, run.times = seconds(), StepTimes(*(10 * each for each in TIMES))
    run.step()
    assert usual_s < seconds() < 1.2 * usual_s
    for _ in range(500):
        run.step()
    assert seconds() == pytest.approx(10 * usual_s, rel=0.01)
