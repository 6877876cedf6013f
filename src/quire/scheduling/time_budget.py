"""Shares of a step for prompts: chunked prefill (Agrawal et al. 2024), and a part of the step's target time.

Two tokens of a stream are as far apart as the step between them takes. So a step that computes the next token of a
sequence takes only as many tokens of prompts as keep it within the target, by the prices that the worker has measured
(`quire.core.step_times`). Without a decode there is no limit, nor before the first measurement. Where the decodes leave
no room for a token, prompts advance in every m-th step, by a chunk as long as the decodes: m, 2 to 8, is what a step
takes over the target. Reading a long context counts as much as the chunk behind it, at least: a token at a time would
read it for each. Streams and prompts are both slower than asked for then, and none stands still.
A prompt that takes t alone takes about t T / (T - d) beside decodes of d seconds, T the target.

With a target for first tokens, too, a long prompt is hurried while it can still meet that: other long prompts leave
half of each step to it, as they do for short ones. One that would be too late even alone waits as others do, and
nothing is held up for it.

A long prompt is computed in chunks, and a chunk leaves half of the step's budget to requests with little to compute,
and to hurried ones, as far as they can use it. So a short request waits for a step or two, not for a whole long prompt;
without such requests, long prompts take the whole budget. That is a number of tokens, and with a target for the time of
steps no more than fit into it beside the decodes. A model that computes texts as a whole has no chunks.
"""

import math
from collections.abc import Callable, Iterable
from itertools import chain, islice

from quire.core.sequence import NO_ROW, Request, Sequence
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.scheduling.plan_builder import PlanBuilder

NO_LIMIT = 1 << 30     # tokens
MOST_KNOWN = 32        # tokens that a decoding sequence may have to compute: drawn, or forced by a grammar
MOST_STEPS = 8         # between two that advance prompts, where the target cannot be held


class TimeBudget:
    """Limits the tokens of prompts in the steps of one scheduler to a target, in seconds; infinity: no limit.

    `first_s`: the target for the time from a request's arrival to its first token. `tokens_per_step`: at most.
    """

    def __init__(self, target_s: float, first_s: float = math.inf, tokens_per_step: int = NO_LIMIT) -> None:
        self.target_s, self._first_s, self._tokens_per_step = target_s, first_s, tokens_per_step
        self.num_unmet = 0                         # steps in which decodes left no room for a token of a prompt
        self.has_warned = False  # set by the engine, which logs the first such step
        self.times: StepTimes | None = None        # the prices; None: nothing was measured yet
        self._decodes: Callable[[], StepWork] = StepWork
        self._now_s = 0.0
        self._left_s: float | None = None          # what this step has for prompts; None: none has asked yet
        self.decode_s = 0.0                        # decodes of the last step that was limited
        self._num_passed = 0                       # steps since prompts have advanced, where the target cannot be held

    @property
    def has_target(self) -> bool:
        """Return whether plans depend on the times of steps."""
        return min(self.target_s, self._first_s) < math.inf

    @property
    def is_limited(self) -> bool:
        """Return whether prompts of this step have a limit, once one has asked."""
        return self._left_s is not None and self._left_s != math.inf

    @property
    def num_between(self) -> int:
        """Return in which of how many steps prompts advance, where the target cannot be held."""
        return steps_between(self.decode_s, self.target_s)

    def record(self, times: StepTimes | None) -> None:
        """Use these prices from now on; None, or prices that no worker can have measured: those known before."""
        if times is None or not math.isfinite(sum(times)) or min(times) < 0:
            return
        if times.step_s > 0 and times.margin >= 1:
            self.times = times

    def start_step(self, decodes: Callable[[], StepWork], now_s: float | None = None) -> None:
        """Begin a step. `decodes`, called if a prompt asks for tokens, returns what decoding sequences compute.

        `now_s`: the time by the clock of requests; None: as in the step before.
        """
        self._decodes, self._left_s = decodes, None
        self._now_s = self._now_s if now_s is None else now_s

    def lift(self) -> bool:
        """Remove the limit of this step; return whether there was one."""
        was_limited = self.is_limited
        self._left_s = math.inf
        return was_limited

    def most_tokens(self, start: int) -> int:
        """Return the most tokens from position `start` of a prompt on that this step has time for."""
        if self._left_s is None:
            self._left_s = self._measure(start)
            if not self._left_s:
                return self._unmet(start)
            self._num_passed = 0
        return self._fitting(start, self._left_s)

    def is_hurried(self, request: Request, start: int, num_missing: int) -> bool:
        """Return whether a request with `num_missing` tokens to compute from `start` on can meet its target."""
        if self._first_s == math.inf or self.times is None or request.live[0].num_output_tokens:
            return False
        decode_s = self.decode_s if self.is_limited else 0.0
        needed_s = self.times.prompt_seconds(start, num_missing, self._tokens_per_step, decode_s, self.target_s)
        return needed_s <= self._first_s - (self._now_s - request.arrived_s)

    def spend(self, start: int, num_tokens: int) -> None:
        """Take the time of these tokens of a prompt from what is left."""
        if self._left_s is not None and self.times is not None:
            chunk = chunk_work(start, num_tokens)
            self._left_s -= self.times.seconds(chunk) - self.times.step_s

    def _measure(self, start: int) -> float:
        """Return the seconds that decodes leave; infinity without decodes or prices, 0 if no token at `start` fits."""
        if self.times is None or self.target_s == math.inf or not (work := self._decodes()).num_context:
            return math.inf
        self.decode_s = self.times.seconds(work)
        left_s = room_s(self.times, self.decode_s, self.target_s)
        return left_s if self._fitting(start, left_s) >= 1 else 0.0

    def _fitting(self, start: int, left_s: float) -> int:
        if left_s == math.inf or self.times is None:
            return NO_LIMIT
        return self.times.most_tokens(start, left_s)

    def _unmet(self, start: int) -> int:
        """Return the tokens of a step in which decodes leave no room for one: none, or a chunk in every m-th step."""
        assert self.times is not None, "a limit without prices"
        self.num_unmet += 1
        self._num_passed += 1
        if self._num_passed < self.num_between:
            return 0
        read_s = self.times.context_s * start
        self._num_passed, self._left_s = 0, read_s + max(self.decode_s, read_s)
        return max(1, self._fitting(start, self._left_s))


def room_s(times: StepTimes, decode_s: float, target_s: float) -> float:
    """Return the seconds of a step that decodes leave to prompts, negative where they take longer than the target.

    The margin takes at most half of them: a target that the decodes hold by themselves has room for prompts.
    """
    return max(target_s / times.margin - decode_s, (target_s - decode_s) / 2)


def steps_between(decode_s: float, target_s: float) -> int:
    """Return in which of how many steps prompts advance beside decodes that leave no room for them."""
    return max(math.ceil(min(decode_s / target_s, MOST_STEPS)), 2)


def decodes(sequence: Sequence) -> bool:
    """Return whether a running sequence has computed its prompt and goes on token by token."""
    num_known = sequence.num_tokens - sequence.num_computed_tokens
    return sequence.num_computed_tokens >= sequence.num_prompt_tokens and num_known <= MOST_KNOWN


def decode_work(running: Iterable[Request]) -> StepWork:
    """Return what the decoding sequences of running requests compute in a step, with the drafts that wait."""
    num_tokens = num_attended = num_context = num_samples = 0.0
    for request in running:
        for sequence in request.live:
            if sequence.row == NO_ROW or not decodes(sequence):
                continue
            start = sequence.num_computed_tokens
            num_drafts = len(sequence.drafts)
            work = chunk_work(start, sequence.num_tokens - start + num_drafts, 1 + num_drafts)
            num_tokens, num_attended = num_tokens + work.num_tokens, num_attended + work.num_attended
            num_context, num_samples = num_context + work.num_context, num_samples + work.num_samples
    return StepWork(num_tokens, num_attended, num_context, num_samples)


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
