"""Async executor for one GPU: the host plans and submits step N + 1 while the device runs step N."""

from collections import deque

from quire.core.plan import StepPlan, StepResult
from quire.execution.cuda.worker import CudaWorker, StepInFlight


class AsyncCudaExecutor:
    """One CUDA worker in this process. A step is launched when it is submitted.

    `max_steps_in_flight` 1: for a worker with a drafter, because the next plan contains its drafts.
    """

    def __init__(self, worker: CudaWorker, max_steps_in_flight: int = 2) -> None:
        self.worker, self.max_steps_in_flight = worker, max_steps_in_flight
        self._steps = deque[StepInFlight]()

    def submit(self, plan: StepPlan) -> None:
        """Launch a step."""
        assert len(self._steps) < self.max_steps_in_flight, "too many steps in flight"
        self._steps.append(self.worker.launch(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest step, and return its result."""
        return self.worker.complete(self._steps.popleft())
