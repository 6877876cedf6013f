"""Null worker: batch preparation without a model, to measure the control plane (`quire bench control-plane`)."""

from quire.core.plan import StepPlan, StepResult
from quire.execution.batch import PersistentBatch

NULL_TOKEN = 7


class NullWorker:
    """Prepares every batch as a worker does, computes nothing, and returns the same token for each sample."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch

    def execute(self, plan: StepPlan) -> StepResult:
        """Prepare the plan's batch and record the token for each of its samples."""
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan)
        token_ids = [NULL_TOKEN] * len(plan.sample_rows)
        self._batch.record(inputs, token_ids)
        return StepResult(token_ids)
