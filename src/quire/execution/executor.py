"""Executors: the interface between the scheduler and the workers that run its plans."""

from collections import deque
from typing import Protocol

from quire.core.plan import GraphCounts, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order in which they were submitted, on workers that it owns.

    `submit` and `collect` are apart so that a later plan can be made while an earlier step runs.
    """

    @property
    def max_steps_in_flight(self) -> int:
        """Most steps that may be submitted and not collected. 1: the next plan needs the result of the last."""

    @property
    def graphs(self) -> GraphCounts:
        """CUDA graphs of steps, so far."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step: one forward pass over one flat batch of tokens."""

    def collect(self) -> StepResult:
        """Wait for the earliest step not yet collected, and return its result. A step that raises is over, too."""


class StepWorker(Protocol):
    """Runs one step at a time, from plan to result."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its result."""


class LocalExecutor:
    """One worker in this process; the step runs when it is collected."""

    max_steps_in_flight, graphs = 1, GraphCounts()

    def __init__(self, worker: StepWorker) -> None:
        self.worker = worker
        self._plans = deque[StepPlan]()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self.worker.execute(self._plans.popleft())
