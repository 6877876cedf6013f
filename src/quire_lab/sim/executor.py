"""Simulated executor: a virtual clock advanced by a cost model, so that the real scheduler runs without a model.

With a timer, a worker's own, the times of steps are measured as in an engine, so plans keep to targets of time. Loads
no torch. The token of a row is its row number, so that the branches of a request differ.
"""

from collections.abc import Callable
from itertools import accumulate
from random import Random

import numpy as np

from quire.core.beam_search_params import num_candidates
from quire.core.deltas import TokenLogprobs
from quire.core.plan import UNMEASURED, MeasuredRates, NewRow, StepPlan, StepResult
from quire.execution.step_timer import StepTimer

CANDIDATE_GAP = 1.5  # mean difference between consecutive logprobs of a beam's likeliest tokens


class SimulatedExecutor:
    """Returns the result of every plan at once; `now_s` is the virtual time at which the last one was ready.

    `step_s` returns the seconds of a plan, `swap_s` those of a number of swapped blocks. `on_step` is called with each
    plan and its seconds between schedule and update, while the plan holds its blocks.
    """

    max_steps_in_flight = 1
    now_s = 0.0

    def __init__(
        self,
        step_s: Callable[[StepPlan], float],
        swap_s: Callable[[int], float] = lambda num_blocks: 0.0,
        rates: MeasuredRates = UNMEASURED,
        timer: StepTimer | None = None,
    ) -> None:
        self._step_s, self._swap_s, self._rates, self._timer = step_s, swap_s, rates, timer
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        self._random = Random(0)  # noqa: S311 (a simulation)
        self._beams: dict[int, NewRow] = {}  # rows of beam searches
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Advance the clock to the end of the oldest plan."""
        plan = self._plans.pop(0)
        for new in plan.new_rows:
            self._beams.pop(new.row, None)
            if new.beam is not None:
                self._beams[new.row] = new
        seconds = self._step_s(plan)
        self.now_s += seconds
        rates, ratio = self._rates, None
        if self._timer is not None:
            rates = rates._replace(step_times=self._timer.times)  # the steps before give them, as in a worker
            starts = np.array(plan.starts, dtype=np.int64)
            ratio = self._timer.record(starts, starts + np.array(plan.counts), seconds)
        self.on_step(plan, seconds)
        num_swapped = len(plan.swap_outs) + len(plan.swap_ins)
        return StepResult(
            token_ids=plan.sample_rows,
            logprobs=[self._candidates(row) for row in plan.sample_rows] if self._beams else None,
            swap_s=self._swap_s(num_swapped) if num_swapped else 0.0,
            rates=rates,
            step_s=seconds,
            step_ratio=ratio,
        )

    def _candidates(self, row: int) -> TokenLogprobs | None:
        """Return random likeliest tokens of a beam, after the sampled one, with random logprobs."""
        new = self._beams.get(row)
        if new is None or new.beam is None:
            return None
        num = num_candidates(new.beam, len(new.eos_token_ids))
        logprobs = list(accumulate(-self._random.expovariate(1 / CANDIDATE_GAP) for _ in range(num)))
        ids = self._random.sample(range(32_000), num)
        return TokenLogprobs([ids[0], *ids], [logprobs[0], *logprobs], [1, *range(1, num + 1)])
