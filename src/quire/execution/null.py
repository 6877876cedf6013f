"""An executor without a model: what the control plane costs, and nothing else (`quire bench control-plane`)."""

from quire.core.plan import StepPlan, StepResult
from quire.execution.batch import PersistentBatch

NULL_TOKEN = 7


class NullExecutor:
    """Prepares every batch as a worker does, computes nothing, and answers each sample with the same token."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Prepare the oldest plan's batch and record the token for each of its samples."""
        plan = self._plans.pop(0)
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan)
        token_ids = [NULL_TOKEN] * len(plan.sample_rows)
        self._batch.record(inputs, token_ids)
        return StepResult(token_ids)
