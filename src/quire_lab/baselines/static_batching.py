"""Static batching: whole batches, one after the other, as FasterTransformer's users and the first servers had them.

When nothing runs, the earliest arrivals are admitted, as many as fit, and the batch runs until all of its sequences
have ended. A sequence that ends earlier keeps its row and memory and is computed on as padding, and its answer
is returned when the batch is over (the baseline of Kwon et al. 2023, section 6.1). Prompts are not padded:
FasterTransformer leaves that out, too. Only where each sequence has the longest length reserved: padding must fit.
"""

from collections.abc import Callable

from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import SequenceDelta
from quire.core.plan import StepPlan, StepResult
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.waiting_lines import Lack
from quire_lab.baselines.buddy_pool import ContiguousManager, ReservingAdmission


class StaticScheduler(Scheduler):
    """A scheduler that admits no request while another runs."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, admission: type[AdmissionControl]) -> None:
        assert isinstance(cache, ContiguousManager) and cache.policy == "contiguous-max", "no room for padding"  # noqa: PT018
        super().__init__(config, cache, admission)
        self._held: dict[tuple[int, int], SequenceDelta] = {}  # the last ones of padding, by request id and branch

    def abort(self, request_id: int) -> bool:
        """End a request at once; its withheld deltas are dropped."""
        self._held = {key: delta for key, delta in self._held.items() if key[0] != request_id}
        return super().abort(request_id)

    def _end_late(self, request: Request) -> None:
        """End a request past its deadline; its withheld deltas are returned."""
        own = [key for key in self._held if key[0] == request.request_id]
        self._recorder.deltas += [self._held.pop(key) for key in own]
        super()._end_late(request)

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, because its text is complete."""
        self._held.pop((request_id, index), None)
        return super().finish(request_id, index)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step; give padding its next token; when all is padding, end the batch."""
        assert not result.rows, "static batches take one token per row"
        sampled = zip(self.step.sampled, result.token_ids, strict=True)
        padded = [(*each, token) for each, token in sampled if each[1].status is SequenceStatus.PADDING]
        deltas = super().update(plan, result)
        for request, sequence, token in padded:
            self._complete(request, sequence)
            sequence.token_ids.append(token)
        if all(each.status is SequenceStatus.PADDING for request in self.queues.running for each in request.live):
            for request in self.queues.running.copy():
                super().abort(request.request_id)
        held = self._held | {(each.request_id, each.index): each for each in deltas if each.finish_reason is not None}
        here = {(request.request_id, each.index) for request in self.queues.running for each in request.live}
        self._held = {key: delta for key, delta in held.items() if key in here}
        return [each for each in deltas if each.finish_reason is None] + [held[key] for key in held if key not in here]

    def roll_back(self) -> list[int]:
        """Roll back a failed step: padding is not computed again, and returned by the next step."""
        self._end_padding()
        return super().roll_back()

    def requeue_running(self) -> None:
        """Preempt all running requests; padding is not computed again, and returned by the next step."""
        self._end_padding()
        super().requeue_running()

    def _end_padding(self) -> None:
        for request in self.queues.running.copy():
            for sequence in request.live.copy():
                if sequence.status is SequenceStatus.PADDING:
                    self._finish(request, sequence)

    def _admit(self, step: PlanBuilder, budget: int) -> None:
        """Admit the next batch when nothing runs."""
        if not self.queues.running:
            super()._admit(step, budget)

    def _complete(self, request: Request, sequence: Sequence) -> None:
        """Make a sequence padding, or end it where it is given the last token of the model."""
        self.queues.make_padding(sequence)
        if sequence.num_tokens + 1 >= self.config.max_model_len:
            self._finish(request, sequence)


def make_baseline(
    config: SchedulerConfig, cache_config: CacheConfig, unprepared: Callable[[Request], Lack | None]
) -> Scheduler:
    """Return the scheduler of the configuration's way of batching, over a cache of contiguous chunks.

    A static batch has no request that has to be prepared.
    """
    cache = ContiguousManager(cache_config)
    if config.batching == "static":
        return StaticScheduler(config, cache, ReservingAdmission)
    return Scheduler(config, cache, ReservingAdmission, unprepared)
