"""The simulated executor keeps time and answers every sample; branches differ, beams get candidates."""

import pytest

from quire.core.plan import BlockCopy, MeasuredRates, NewRow, StepPlan
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.execution.step_timer import StepTimer
from quire_lab.sim.simulation import SimulatedExecutor


def run(executor: SimulatedExecutor, plan: StepPlan) -> list[int]:
    executor.submit(plan)
    return executor.collect().token_ids


def test_clock_goes_on_by_what_steps_cost() -> None:
    seen: list[float] = []
    executor = SimulatedExecutor(lambda plan: len(plan.rows) / 4)
    executor.on_step = lambda plan, seconds: seen.append(seconds)
    run(executor, StepPlan(rows=[0, 1], sample_rows=[0, 1]))
    run(executor, StepPlan(rows=[0]))
    assert executor.now_s == 0.75
    assert seen == [0.5, 0.25]


def test_branches_get_tokens_of_their_own() -> None:
    first, second = run(SimulatedExecutor(lambda plan: 1.0), StepPlan(rows=[3], sample_rows=[3, 5]))
    assert first != second


def test_swaps_and_rates_are_told() -> None:
    rates = MeasuredRates(100.0, 2.0, 3.0)
    executor = SimulatedExecutor(lambda plan: 1.0, swap_s=lambda num: num / 8, rates=rates)
    executor.submit(StepPlan(rows=[0], swap_outs=[BlockCopy(0, 1)], swap_ins=[BlockCopy(1, 2)]))
    result = executor.collect()
    assert (result.swap_s, result.rates) == (0.25, rates)


def test_steps_are_timed_as_by_a_worker_if_there_is_a_timer() -> None:
    plan = StepPlan(rows=[0, 1], starts=[40, 0], counts=[1, 30], sample_rows=[0, 1])
    for timer in (None, StepTimer()):
        executor = SimulatedExecutor(lambda plan: 0.5, timer=timer)
        executor.submit(plan)
        executor.submit(plan)
        first, second = executor.collect(), executor.collect()
        assert (first.step_s, first.step_ratio, first.rates.step_times) == (0.5, None, None)
        assert (second.step_ratio is None, second.rates.step_times is None) == (timer is None, timer is None)
        if second.step_ratio is not None:
            assert second.step_ratio == pytest.approx(1.0)


def test_beams_get_as_many_candidates_as_matter_and_only_they() -> None:
    executor = SimulatedExecutor(lambda plan: 1.0)
    beam = NewRow(0, [1], 1, [0], SamplingParams(), seed=0, beam=BeamSearchParams(3, 8))
    executor.submit(StepPlan(new_rows=[beam], rows=[0, 1], sample_rows=[0, 1]))
    logprobs = executor.collect().logprobs
    assert logprobs is not None
    candidates, none = logprobs
    assert none is None
    assert candidates is not None
    assert len(candidates.token_ids) == 1 + 3
    assert len(set(candidates.token_ids)) == 3
    assert candidates.logprobs[1:] == sorted(candidates.logprobs[1:], reverse=True)
