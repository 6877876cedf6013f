"""Chunked prefill: the part of a step that long prompts may take (Agrawal et al. 2024).

A long prompt is computed in chunks, and a chunk leaves half of the step's budget to requests with little to compute,
and to hurried ones, as far as they can use it. So a short request waits for a step or two, not for a whole long prompt;
without such requests, long prompts take the whole budget. That is a number of tokens, and with a target for the time of
steps no more than fit into it beside the decodes (`quire.scheduling.time_budget`). A model that computes texts as a
whole has no chunks.
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice

from quire.core.sequence import Request
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.time_budget import TimeBudget, decode_work, decodes

_MAX_LOOKED_AT = 512  # requests counted as wanting budget: more of them change nothing
_MAX_PASSED = 8       # long prompts in a step that shorter ones behind them pass: each is looked up in the cache


class ChunkedPrefillBudget:
    """The part of each step's budget that goes to requests with more than half a budget to compute.

    `running` and `admissible` could use some of a step's budget. A step starts with the first request that asks.
    """

    def __init__(
        self, budget: int, running: list[Request], admissible: Callable[[], Iterable[Request]], time: TimeBudget
    ) -> None:
        self._budget, self._running, self._admissible, self._time = budget, running, admissible, time
        self._step: PlanBuilder | None = None
        self._left: int | None = None       # left of this step's part; None: no long prompt was met yet
        self._num_passed = 0

    def _start_step(self, step: PlanBuilder) -> None:
        self._step, self._left, self._num_passed = step, None, 0
        self._time.start_step(lambda: decode_work(self._running), step.now_s)

    def lift(self, step: PlanBuilder) -> bool:
        """Remove the limit of a step's time; return whether there was one."""
        if step is not self._step:
            self._start_step(step)
        was_limited = self._time.lift()
        if was_limited:
            self._left, self._num_passed = None, 0
        return was_limited

    def may_be_passed(self) -> bool:
        """Return whether later requests may be admitted before one more long prompt that got nothing."""
        self._num_passed += 1
        return self._num_passed <= _MAX_PASSED

    def share(self, step: PlanBuilder, request: Request, num_missing: int, budget: int, start: int) -> int:
        """Return how many tokens of what is left of the step's budget a request may use that has so many to compute.

        `start`: the position of the first. The first long prompt of a step gets at least one, unless the step has no
        time; later ones may get none.
        """
        if step is not self._step:
            self._start_step(step)
        num_in_time = self._time.most_tokens(start)
        if self._is_served_first(request, num_missing, start):
            granted = min(budget, num_in_time)
        else:
            if self._left is None:
                whole = min(self._budget, num_in_time)
                self._left = whole - self._wanted_first(whole // 2)
            granted = min(num_missing, budget, num_in_time, self._left)
            self._left -= granted
        self._time.spend(start, min(granted, num_missing))
        return granted

    def _is_served_first(self, request: Request, num_missing: int, start: int) -> bool:
        """Return whether long prompts leave room for a request: it has little to compute, or is hurried."""
        return num_missing <= max(1, self._budget // 2) or self._time.is_hurried(request, start, num_missing)

    def _wanted_first(self, most: int) -> int:
        """Count the tokens that requests could use now that are served first, up to `most`.

        Where time is the limit, it is what decodes have left already.
        """
        wanted, is_timed = 0, self._time.is_limited
        for request in islice(chain(self._running, self._admissible()), _MAX_LOOKED_AT):
            sequence = request.live[0]
            start = sequence.num_computed_tokens
            num_missing = sequence.num_tokens - start
            if self._is_served_first(request, num_missing, start) and not (is_timed and decodes(sequence)):
                wanted += num_missing + len(request.live) - 1
            if wanted >= most:
                return most
        return wanted


class WholePrompts(ChunkedPrefillBudget):
    """The budget of steps in which a prompt is computed as a whole or not at all: shorter ones may pass it."""

    def share(self, step: PlanBuilder, request: Request, num_missing: int, budget: int, start: int) -> int:
        """Return the tokens of a whole prompt, 0 if they are more than what is left of the budget.

        The first prompt of a step always fits: none is longer than a budget.
        """
        if step is not self._step:
            self._start_step(step)
        return num_missing if num_missing <= budget else 0
