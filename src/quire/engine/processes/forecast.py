"""Forecast of times to a first token: what waits before a request and its prompt, priced by an engine's last report.

Prompts share each step with the sequences that decode: with a target for such steps, by the time that decodes leave of
it, else by the tokens that a step has room for. Where seats are short, a request also waits until as many answers have
ended as there are requests before it. Those waits are counted in steps: how many an answer still has follows from its
`max_tokens` and from the lengths of the last answers, however fast the machine is just now. What is not known counts as
nothing, so that no request is refused for it.

The host's work between two steps is measured as the steps are. What else no price has in it, such as a machine that
became slower, is corrected by the last requests with a deadline: measured over predicted times to their first tokens.
The correction is the least with which SHARE_IN_TIME of what it accepts would be in time, given what is asked for. Where
deadlines differ that is hardly above the median error: few of them are so close to the wait that an error decides.
Where all ask for the same, the queue of an overload stands at the deadline, and half of what is accepted by the median
would be late; a queue that is a little shorter keeps the seats as full.

Totals of what waits are kept by priority and by client, so that a forecast for each call of a server does not walk the
queue. All work is in whole tokens and pairs: sums are exact, and nothing is left of what was removed.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from quire.core.config import SchedulingPolicy
from quire.core.outputs import KVStats
from quire.core.sequence import Request
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.engine.messages import EngineState, Stepped
from quire.scheduling.time_budget import room_s, steps_between


class Asked(NamedTuple):
    """A request that may be sent, as far as its place in the order and its work are concerned."""

    prompt: StepWork = StepWork()   # work of its prompts
    priority: int = 0
    client_id: str = ""
    weight: float = 1.0
    num_requests: int = 1
    knows_cached: bool = False      # `prompt` is without what is cached


def asked_of(request: Request) -> Asked:
    """Return what a request asks for."""
    prompt = chunk_work(0, len(request.prompt_token_ids))
    return Asked(prompt, request.priority, request.client_id, request.weight)


class Before(NamedTuple):
    """Queue before a request: the number of requests, and the work of their prompts."""

    num_requests: int = 0
    prompts: StepWork = StepWork()


class _Total(NamedTuple):
    """Requests, their prompt tokens, and the squares of the lengths of their prompts."""

    num_requests: int = 0
    num_tokens: int = 0
    num_squares: int = 0

    @property
    def work(self) -> StepWork:
        """Work of the prompts: the sum of `chunk_work` of each."""
        return StepWork(self.num_tokens, (self.num_squares + self.num_tokens) / 2, self.num_tokens)


_NONE = _Total()


class QueuedRequests:
    """The requests by number."""

    def __init__(self) -> None:
        self.requests = dict[int, Request]()
        self.num_tokens = 0                         # prompt tokens x n
        self._by_priority = dict[int, _Total]()
        self._by_client = dict[str, _Total]()
        self._weights = dict[str, float]()          # clients, by their last requests

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is here."""
        return request_id in self.requests

    def add(self, request: Request) -> None:
        """Add a request that is about to be sent."""
        self.requests[request.request_id] = request
        self._weights[request.client_id] = request.weight
        self._count(request, 1)

    def discard(self, request_id: int) -> None:
        """Remove a request, if it is here."""
        if (request := self.requests.pop(request_id, None)) is not None:
            self._count(request, -1)

    def clear(self) -> None:
        for request_id in list(self.requests):
            self.discard(request_id)

    def before(self, asked: Asked, policy: SchedulingPolicy) -> Before:
        """Return what waits before a request by a policy, without ageing: it puts no later request before an earlier.

        Under `fair` each other client has as much before it as its own client has, by their weights.
        """
        first = {key: each for key, each in self._by_priority.items() if policy != "priority" or key <= asked.priority}
        num_requests = sum(each.num_requests for each in first.values())
        total = sum((each.work for each in first.values()), StepWork())
        if policy != "fair":
            return Before(num_requests, total)
        own = self._by_client.get(asked.client_id, _NONE).work
        share = (own.num_tokens + asked.prompt.num_tokens) / asked.weight
        for client_id, total_of in self._by_client.items():
            if client_id != asked.client_id:
                part = min(1.0, share * self._weights[client_id] / max(total_of.num_tokens, 1.0))
                own += StepWork(*(part * each for each in total_of.work))
        return Before(round(num_requests * own.num_tokens / max(total.num_tokens, 1.0)), own)

    def _count(self, request: Request, sign: int) -> None:
        """Add a request to the totals, or subtract it."""
        length = len(request.prompt_token_ids)
        self.num_tokens += sign * length * request.params.n
        counted: tuple[tuple[dict[Any, _Total], object], ...] = (
            (self._by_priority, request.priority), (self._by_client, request.client_id)
        )  # fmt: skip
        for totals, key in counted:
            num_requests, num_tokens, num_squares = totals.get(key, _NONE)
            if num_requests + sign:
                totals[key] = _Total(num_requests + sign, num_tokens + sign * length, num_squares + sign * length**2)
            else:
                del totals[key]
        if request.client_id not in self._by_client:
            del self._weights[request.client_id]


NUM_STEPS = 64        # over which prices are averaged
NUM_ENDED = 64        # last answers, by which the lengths of others are known
NUM_MEASURED = 128    # last first tokens, by which predictions are corrected: fewer are of one mood of the machine
LEAST_MEASURED = 4    # before that nothing is corrected
SHARE_IN_TIME = 0.95  # part of the accepted requests
LATE_LONGER = 1.25    # times its deadline: what is assumed of a first token that was not waited for
MOST_OFF = 4.0        # times: of a correction
FRESH_S = 10.0        # without a first token a correction is dropped: what it refuses cannot show that it is wrong
_NO_ROOM = ("kv_blocks", "swapped_first")


@dataclass(slots=True)
class _Answer:
    """A request that was sent and has not ended: what was predicted, and how far it is."""

    sent_s: float
    predicted_s: float      # 0: nothing was
    num_branches: int
    max_steps: int
    num_steps: int = 0      # with a token of its first branch


class _Seat(NamedTuple):
    """Time until a seat is free: a number of steps, in which a number of sequences decode."""

    num_steps: float = 0.0
    num_decoding: int = 0


class Forecast:
    """Predictions for one engine. `itl_target_s`: of steps in which a sequence decodes; infinity: none."""

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, itl_target_s: float, policy: SchedulingPolicy
    ) -> None:
        self._max_num_batched_tokens, self._max_num_seqs = max_num_batched_tokens, max_num_seqs
        self._itl_target_s, self._policy = itl_target_s, policy
        self._times: StepTimes | None = None
        self._host_s = 0.0                              # between two steps
        self._computed_s: float | None = None           # when the last step was, if another one was to follow
        self._sent = dict[int, _Answer]()
        self._running = dict[int, _Answer]()
        self._ended: deque[int] = deque(maxlen=NUM_ENDED)                       # steps of the last answers
        self._measured: deque[tuple[float, float]] = deque(maxlen=NUM_MEASURED)  # (measured / predicted, predicted)
        self._asked: deque[float] = deque(maxlen=NUM_MEASURED)                   # asked / predicted
        self._correction = 1.0
        self._reported_s = self._measured_s = 0.0       # when the last step, and first token, was reported

    def __len__(self) -> int:
        """Count the requests that were sent and have not ended."""
        return len(self._sent)

    def record_sent(self, request: Request, predicted_s: float, now_s: float) -> None:
        """Record a request that is sent, with the uncorrected prediction for it; 0: without one."""
        max_tokens, num_branches = max(request.max_tokens, 1), request.params.n
        self._sent[request.request_id] = _Answer(now_s, predicted_s, num_branches, max_tokens)

    def forget(self, request_id: int) -> None:
        """Remove a request that has ended, or was aborted, if it is still here."""
        self._sent.pop(request_id, None)
        self._running.pop(request_id, None)

    def record_step(self, step: Stepped, now_s: float) -> None:
        """Record the prices of a step, and the requests that it admitted, extended and ended."""
        self._reported_s = now_s
        self._record_times(step)
        for admission in step.admissions:
            if (answer := self._sent.get(admission.request_id)) is not None:
                self._running[admission.request_id] = answer
        for request_id in step.preempted:
            self._running.pop(request_id, None)
        for delta in step.deltas:
            if (answer := self._sent.get(delta.request_id)) is None:
                continue
            if answer.predicted_s > 0 and not answer.num_steps and (delta.token_ids or delta.is_late):
                self._measure(answer, (now_s - answer.sent_s) * (LATE_LONGER if delta.is_late else 1.0), now_s)
            if delta.index == 0 and delta.token_ids:
                answer.num_steps += 1
            if delta.finish_reason is not None or delta.error is not None:
                answer.num_branches -= 1
                if not answer.num_branches or delta.error is not None:
                    if answer.num_steps:
                        self._ended.append(answer.num_steps)
                    self.forget(delta.request_id)

    def record_asked(self, predicted_s: float, within_s: float) -> None:
        """Record that a first token is wanted within some seconds, accepted or refused, with its prediction."""
        if predicted_s > 0 and within_s != math.inf:
            self._asked.append(within_s / predicted_s)

    def correct(self, predicted_s: float, now_s: float) -> float:
        """Return the seconds which a first token must be allowed to take, so that SHARE_IN_TIME are in time."""
        return predicted_s * (self._correction if now_s - self._measured_s <= FRESH_S else 1.0)

    def first_token_s(self, state: EngineState, queued: QueuedRequests, asked: Asked, now_s: float) -> float:
        """Return the likely seconds until the last of the asked prompts has its first token, uncorrected.

        0 where no price is known. `state`: of the last report.
        """
        times = self._times or state.step_times
        if times is None:
            return 0.0
        before = queued.before(asked, self._policy)
        uncached = _uncached_share(state.kv)
        own = asked.prompt if asked.knows_cached else _scaled(asked.prompt, uncached)
        ahead = _scaled(before.prompts, uncached) + state.prompts_left
        whole_s = self._prompts_s(times, ahead + own, state, self._seat(state, before))
        if not state.num_running:
            return whole_s
        return max(whole_s - (now_s - self._reported_s), self._prompts_s(times, own, state, _Seat()))

    def _prompts_s(self, times: StepTimes, work: StepWork, state: EngineState, seat: "_Seat") -> float:
        """Return the seconds of prompts beside the sequences that decode, until the last one has a seat and is done."""
        prompts_s = times.token_s * work.num_tokens + times.attended_s * work.num_attended
        num_seqs = max(state.num_running_seqs, seat.num_decoding)
        room = max(self._max_num_batched_tokens - num_seqs, 1)
        num_steps: float = max(seat.num_steps + 1, math.ceil(work.num_tokens / room))
        if not num_seqs:
            return prompts_s + num_steps * (times.step_s + self._host_s)
        num_held = 0 if state.kv is None else state.kv.used_blocks * state.kv.block_size
        num_context = num_held * num_seqs / max(state.num_running_seqs, 1)
        decode_s = times.seconds(StepWork(0, num_context, num_context, num_seqs))
        left_s = room_s(times, decode_s, self._itl_target_s)
        if left_s <= 0:
            num_between = steps_between(decode_s, self._itl_target_s)
            num_steps = max(num_steps, num_between * math.ceil(prompts_s / decode_s))
        elif left_s != math.inf:
            num_steps = max(num_steps, math.ceil(prompts_s / left_s))
        return prompts_s + num_steps * (decode_s + self._host_s)

    def _seat(self, state: EngineState, before: Before) -> "_Seat":
        """Return when a seat is free behind those that wait; at once where no answer has ended yet.

        Free seats are taken first, then those that the running requests leave. All are left again, in the same order,
        after answers of the mean length.
        """
        num_free = 0 if state.waits_for in _NO_ROOM else max(self._max_num_seqs - state.num_running_seqs, 0)
        num_seats = num_free + len(self._running)
        if before.num_requests < num_free or not self._ended or not num_seats:
            return _Seat()
        lengths = sorted(self._ended)
        sums = list(accumulate(lengths, initial=0))
        left = [0.0] * num_free + sorted(_steps_left(answer, lengths, sums) for answer in self._running.values())
        num_rounds, place = divmod(before.num_requests, num_seats)
        return _Seat(left[place] + num_rounds * sums[-1] / len(lengths), num_seats)

    def _record_times(self, step: Stepped) -> None:
        """Record the prices of a step. Those of single steps follow a machine's moods; a queue outlasts them."""
        times, timing = step.state.step_times, step.timing
        if times is None or timing is None or timing.seconds is None:
            self._computed_s = None
            return
        known = self._times or times
        self._times = StepTimes(*[old + (new - old) / NUM_STEPS for old, new in zip(known, times, strict=True)])
        if self._computed_s is not None:
            self._host_s += (max(step.started_s - self._computed_s, 0.0) - self._host_s) / NUM_STEPS
        self._computed_s = step.started_s + timing.seconds if step.state.num_running else None

    def _measure(self, answer: _Answer, first_s: float, now_s: float) -> None:
        """Compare the seconds to a first token with their prediction."""
        self._measured_s = now_s
        self._measured.append((first_s / answer.predicted_s, answer.predicted_s))
        if len(self._measured) >= LEAST_MEASURED:
            self._correction = min(max(_least_correction(self._measured, self._asked), 1 / MOST_OFF), MOST_OFF)


def _steps_left(answer: _Answer, lengths: list[int], sums: list[int]) -> float:
    """Return the likely steps that an answer has left: as the last answers that were longer, or the mean of all.

    `lengths`: of the last answers, ascending; `sums`: of the first 0, 1, 2, ... of them.
    """
    most = answer.max_steps - answer.num_steps
    num_shorter = bisect_right(lengths, answer.num_steps)
    if num_longer := len(lengths) - num_shorter:
        likely = (sums[-1] - sums[num_shorter]) / num_longer - answer.num_steps
    else:
        likely = sums[-1] / len(lengths)
    return max(min(likely, most), 0)


def _least_correction(measured: Collection[tuple[float, float]], asked: Collection[float]) -> float:
    """Return the least factor with which SHARE_IN_TIME of what is accepted would be in time, at least the median error.

    `measured`: (measured / predicted, weight); `asked`: asked / predicted, accepted from the factor on.
    """
    errors, weights = zip(*sorted(measured), strict=True)
    sums = list(accumulate(weights))

    def quantile(share: float) -> float:
        return float(errors[bisect_left(sums, share * sums[-1])])

    median, least, in_time = quantile(0.5), quantile(SHARE_IN_TIME), 0.0
    for number, slack in enumerate(sorted(asked, reverse=True), start=1):
        if slack < median:
            break
        in_time += sums[bisect_right(errors, slack) - 1] / sums[-1]
        if in_time < SHARE_IN_TIME * number:
            return least
        least = min(least, slack)
    return median


def _uncached_share(kv: KVStats | None) -> float:
    """Return the share of prompt tokens that were not found in the cache so far."""
    if kv is None or not kv.prefix_queries_tokens:
        return 1.0
    return 1.0 - kv.prefix_hits_tokens / kv.prefix_queries_tokens


def _scaled(work: StepWork, share: float) -> StepWork:
    return StepWork(*(share * each for each in work))
