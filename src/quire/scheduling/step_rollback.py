"""Rollback of a failed step: the affected requests are queued again, without what the step may have written."""

from collections.abc import Iterable, Sequence

from quire.cache.manager import KVCacheManager
from quire.core.sequence import NO_ROW, Request
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.preemption import PreemptionPolicy
from quire.scheduling.queues import RequestQueues


def affected_by(steps: Sequence[PlanBuilder], running: Iterable[Request], cache: KVCacheManager) -> list[Request]:
    """Return the running requests that a step admitted, computes or starts, or that hold a block it copies into."""
    at = [request for step in steps for request in (step.at, *step.admitted)]
    plans = [step.plan for step in steps]
    rows = {row for plan in plans for row in (*plan.rows, *(new.row for new in plan.new_rows))}
    rows |= {fork.row for plan in plans for fork in plan.row_forks}
    copied = {copy.dst for plan in plans for copy in plan.copies}

    def is_affected(request: Request) -> bool:
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        return request in at or any(
            each.row in rows or not copied.isdisjoint(cache.block_ids(each.seq_id)) for each in held
        )

    return [request for request in running if is_affected(request)]


def release_affected(
    affected: Sequence[Request], swapped_out: Iterable[Request], queues: RequestQueues, preemption: PreemptionPolicy
) -> None:
    """Queue affected requests again, those that the step was to swap out included, without their blocks."""
    for request in reversed(affected):
        preemption.count("recompute")
        queues.release_for_recompute(request)
    for request in swapped_out:
        if request in queues.swapped:                                   # else it was aborted while the step ran
            queues.release_for_recompute(request)
