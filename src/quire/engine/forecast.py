"""Forecast of times to a first token: what waits before a request and its prompt, priced by an engine's last report.

Prompts share each step with the sequences that decode: with a target for such steps, by the time that decodes leave of
it, else by the tokens that a step has room for. Where seats are short, a request also waits until as many answers have
ended as it has others before it, by how long the last ones held theirs. What is not known counts as nothing, so that no
request is refused for it.
"""

import math
from collections import deque
from collections.abc import Iterable

from quire.core.config import SchedulingPolicy
from quire.core.outputs import KVStats
from quire.core.step_times import StepTimes, StepWork
from quire.engine.messages import EngineState
from quire.engine.output_processor import FinishedRequest
from quire.engine.queued_requests import Asked, Before, QueuedRequests
from quire.scheduling.time_budget import room_s, steps_between

NUM_STEPS = 64      # over which prices are averaged
NUM_ENDED = 64      # last answers, by which the time of a seat is known
_NO_ROOM = ("max_num_seqs", "kv_blocks", "swapped_first")


class Forecast:
    """Predictions for one engine. `itl_target_s`: of steps in which a sequence decodes; infinity: none."""

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, itl_target_s: float, policy: SchedulingPolicy
    ) -> None:
        self._max_num_batched_tokens, self._max_num_seqs = max_num_batched_tokens, max_num_seqs
        self._itl_target_s, self._policy = itl_target_s, policy
        self._times: StepTimes | None = None
        self._held_s: deque[float] = deque(maxlen=NUM_ENDED)

    def record_times(self, times: StepTimes | None) -> None:
        """Record the prices of a step. Those of single steps follow a machine's moods; a queue outlasts them."""
        if times is None:
            return
        known = self._times or times
        self._times = StepTimes(*(old + (new - old) / NUM_STEPS for old, new in zip(known, times, strict=True)))

    def record_ended(self, ended: Iterable[FinishedRequest]) -> None:
        """Record how long requests that have ended held their seats."""
        for each in ended:
            first_s, last_s = each.metrics.first_scheduled_s, each.metrics.finished_s
            if first_s is not None and last_s is not None:
                self._held_s.append(last_s - first_s)

    def first_token_s(self, state: EngineState, queued: QueuedRequests, asked: Asked) -> float:
        """Return the seconds until the last of the asked prompts has its first token; 0 where no price is known."""
        times = self._times or state.step_times
        if times is None:
            return 0.0
        before = queued.before(asked, self._policy)
        uncached = _uncached_share(state.kv)
        own = asked.prompt if asked.knows_cached else _scaled(asked.prompt, uncached)
        ahead = _scaled(before.prompts, uncached) + state.prompts_left
        computed_s = self._prompts_s(times, ahead + own, state)
        return max(computed_s, self._seats_s(state, before) + self._prompts_s(times, own, state))

    def _prompts_s(self, times: StepTimes, work: StepWork, state: EngineState) -> float:
        """Return the seconds of prompts beside the sequences that decode."""
        prompts_s = times.token_s * work.num_tokens + times.attended_s * work.num_attended
        room = max(self._max_num_batched_tokens - state.num_running_seqs, 1)
        num_steps = max(1, math.ceil(work.num_tokens / room))
        if not state.num_running_seqs:
            return prompts_s + num_steps * times.step_s
        num_context = 0 if state.kv is None else state.kv.used_blocks * state.kv.block_size
        decode_s = times.seconds(StepWork(state.num_running_seqs, num_context, num_context))
        left_s = room_s(times, decode_s, self._itl_target_s)
        if left_s <= 0:
            num_between = steps_between(decode_s, self._itl_target_s)
            num_steps = max(num_steps, num_between * math.ceil(prompts_s / decode_s))
        elif left_s != math.inf:
            num_steps = max(num_steps, math.ceil(prompts_s / left_s))
        return prompts_s + num_steps * decode_s

    def _seats_s(self, state: EngineState, before: Before) -> float:
        """Return the seconds until a seat is free behind those that wait; 0 where no answer has ended yet.

        Each running request holds its seat as long as the last ones did, and they have begun one after the other: the
        first of them ends after half of their distance.
        """
        num_free = 0 if state.waits_for in _NO_ROOM else self._max_num_seqs - state.num_running_seqs
        num_short = before.num_requests + 1 - num_free
        if num_short <= 0 or not self._held_s:
            return 0.0
        return (num_short - 0.5) * sum(self._held_s) / len(self._held_s) / max(state.num_running, 1)


def _uncached_share(kv: KVStats | None) -> float:
    """Return the share of prompt tokens that were not found in the cache so far."""
    if kv is None or not kv.prefix_queries_tokens:
        return 1.0
    return 1.0 - kv.prefix_hits_tokens / kv.prefix_queries_tokens


def _scaled(work: StepWork, share: float) -> StepWork:
    return StepWork(*(share * each for each in work))
