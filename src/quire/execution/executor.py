"""The door to the computing tower: a plan goes in, a result comes out."""

from collections.abc import Callable
from typing import Protocol

from quire.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order in which they were submitted.

    `submit` and `collect` are apart so that a later plan can be made while an earlier step runs.
    """

    def submit(self, plan: StepPlan) -> None:
        """Start a step: one forward pass over one flat batch of tokens."""

    def collect(self) -> StepResult:
        """Wait for the earliest step not yet collected, and return its result. A step that raises is over, too."""


class LocalExecutor:
    """One worker in this process; the step runs when it is collected. `execute` is the worker's."""

    def __init__(self, execute: Callable[[StepPlan], StepResult]) -> None:
        self._execute = execute
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Run the oldest plan."""
        return self._execute(self._plans.pop(0))
