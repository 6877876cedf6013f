"""Recorded requests under another policy: the same arrivals, lengths and prefixes, on a clock of predicted steps.

The results of a record belong to its plans, so another policy gets results of its own: each request has the tokens that
it had, and a step takes as long as the prices say that the engine had measured last. Both policies are run that way.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quire.core.config import SchedulingPolicy
from quire.core.deltas import SequenceDelta
from quire.core.errors import ConfigError
from quire.core.plan import MeasuredRates, StepPlan, StepResult, decode_result
from quire.core.pooling import Generate
from quire.core.sequence import Request
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.engine.messages import AddRequest, decode_command
from quire.engine.recording.record import Added, Event, RecordStart, Updated
from quire.engine.recording.replay import RecordReplay
from quire.scheduling.scheduler import make_scheduler

_END = -1               # a token that no record has: behind those of a branch


@dataclass(slots=True)
class Outcome:
    """Times of a request under a policy, in seconds from its arrival. None: not reached."""

    client_id: str
    arrived_s: float
    ttft_s: float | None = None
    ended_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RecordedRequests:
    """Recorded requests with their arrivals, the tokens of each branch, and the prices of steps."""

    start: RecordStart
    requests: list[tuple[float, bytes]] = field(default_factory=list)
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    times: StepTimes | None = None

    def see(self, run: RecordReplay, event: Event) -> None:
        """Take what an event, just replayed, tells of requests."""
        if isinstance(event, Added):
            self.requests.append((event.arrived_s, bytes(event.request)))
        elif isinstance(event, Updated):
            self.times = decode_result(event.result).rates.step_times or self.times
            for delta in run.deltas:
                self.outputs[delta.request_id, delta.index] += delta.token_ids

    def run(self, policy: SchedulingPolicy) -> list[Outcome]:
        """Return what the requests with a token, but beam searches, have of a policy. ConfigError without prices."""
        if self.times is None:
            raise ConfigError("policy: the record has no times of steps, so it cannot tell how long others would take")
        run = _Run(self, policy, self.times)
        run.finish()
        return list(run.outcomes.values())

    def request(self, arrived_s: float, message: bytes) -> Request | None:
        """Return a request to run, that ends where it had; None for one without a token."""
        added = decode_command(message)
        assert isinstance(added, AddRequest), f"a request, not {added}"
        request = added.request
        most = max((len(self.outputs.get((request.request_id, i), ())) for i in range(request.params.n)), default=0)
        if not most or not isinstance(request.task, Generate):
            return None
        changed = {"min_tokens": 0, "logprobs": None, "structured_outputs": None, "repetition_detection": None}
        params = replace(request.params, **changed)  # type: ignore[arg-type]
        ends = {"eos_token_ids": frozenset({_END}), "stop_token_ids": frozenset[int]()}
        return replace(request, params=params, max_tokens=most, arrived_s=arrived_s, **ends)  # type: ignore[arg-type]


class _Run:
    def __init__(self, asked: RecordedRequests, policy: SchedulingPolicy, times: StepTimes) -> None:
        self._asked, self._times = asked, times
        config = replace(asked.start.scheduler, scheduling_policy=policy)
        self._scheduler = make_scheduler(config, asked.start.cache)
        made = [request for each in asked.requests if (request := asked.request(*each)) is not None]
        self._waiting = sorted(made, key=lambda request: request.arrived_s, reverse=True)
        self._now_s = 0.0
        self.outcomes: dict[int, Outcome] = {}

    def finish(self) -> None:
        """Run all requests to their ends."""
        scheduler = self._scheduler
        while self._waiting or scheduler.has_requests:
            if not scheduler.has_requests:
                self._now_s = max(self._now_s, self._waiting[-1].arrived_s)
            while self._waiting and self._waiting[-1].arrived_s <= self._now_s:
                request = self._waiting.pop()
                scheduler.add(request)
                self.outcomes[request.request_id] = Outcome(request.client_id, request.arrived_s)
            plan = scheduler.schedule(self._now_s)
            if plan.rows:
                self._step(plan)
            else:
                self._note(scheduler.take_deltas())

    def _step(self, plan: StepPlan) -> None:
        scheduler, outputs = self._scheduler, self._asked.outputs
        self._now_s += self._times.seconds(_work(plan))
        token_ids = []
        for request, sequence in scheduler.step.sampled:
            tokens, place = outputs.get((request.request_id, sequence.index), ()), sequence.num_output_tokens
            token_ids.append(tokens[place] if place < len(tokens) else _END)
        for request_id in scheduler.step.preempted:
            self.outcomes[request_id].num_preemptions += 1
        self._note(scheduler.update(plan, StepResult(token_ids, rates=MeasuredRates(step_times=self._times))))

    def _note(self, deltas: Iterable[SequenceDelta]) -> None:
        for delta in deltas:
            outcome = self.outcomes[delta.request_id]
            since_s = self._now_s - outcome.arrived_s
            if delta.token_ids and outcome.ttft_s is None:
                outcome.ttft_s = since_s
            if delta.finish_reason is not None:
                outcome.ended_s = since_s


def _work(plan: StepPlan) -> StepWork:
    """Return what a plan computes."""
    sampled = set(plan.sample_rows)
    entries = zip(plan.rows, plan.starts, plan.counts, strict=True)
    return sum((chunk_work(start, count, int(row in sampled)) for row, start, count in entries), StepWork())
