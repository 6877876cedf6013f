"""Time budget: the part of a step's target that prompts may take while a sequence decodes.

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
"""

import math
from collections.abc import Callable, Iterable

from quire.core.sequence import NO_ROW, Request, Sequence
from quire.core.step_times import StepTimes, StepWork, chunk_work

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
        """Use these prices from now on; None, or those of a broken worker: those known before."""
        if times is not None and times.is_possible:
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
        """Return the tokens of a step whose decodes leave no room for one: none, or a chunk in every m-th step."""
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
