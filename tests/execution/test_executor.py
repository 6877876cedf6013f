"""Executors run plans in order, and say how many of them they take at once."""

from quire.core.plan import StepPlan, StepResult
from quire.execution.executor import LocalExecutor


class Echo:
    """A worker that answers with the rows that a plan advances."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        return StepResult(plan.rows)


def test_local_executor_runs_plans_in_order_as_they_are_collected() -> None:
    executor = LocalExecutor(worker := Echo())
    for row in range(3):
        executor.submit(StepPlan(rows=[row]))
    assert worker.num_steps == 0
    assert [executor.collect().token_ids for _ in range(3)] == [[0], [1], [2]]
    assert executor.max_steps_in_flight == 1
