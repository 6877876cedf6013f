"""Why requests wait: for each step that left some of them waiting, the one thing that kept the next of them out.

Requests are let in in order, so what keeps out the next keeps out all behind it. A count of steps for each reason is
all that is kept: a request takes note of the counts when it is queued, and of the difference when it is let in. Nothing
is done for those that wait, but for the ones that are skipped so that others run before them.
"""

from quire.core.outputs import WAIT_REASONS, WaitReason
from quire.core.sequence import Request


class WaitReasonCounters:
    """Steps that left somebody waiting, by reason, since start. `now`: what the last plan did so for, if it did."""

    def __init__(self) -> None:
        self._num_steps = [0] * len(WAIT_REASONS)
        self.current: WaitReason | None = None

    def start_step(self) -> None:
        """Begin a step."""
        self.current = None

    def count(self, reason: WaitReason | None) -> None:
        """Take down what kept out the next request, and all behind it; None: nothing did."""
        if reason is not None:
            self.current = reason
            self._num_steps[WAIT_REASONS.index(reason)] += 1

    def count_skipped(self, request: Request, reason: WaitReason) -> None:
        """Take down that a request, and it alone, was skipped."""
        self.current = reason
        request.waited[WAIT_REASONS.index(reason)] += 1

    def start(self, request: Request) -> None:
        """Begin to count for a request that is queued."""
        request.waited = [-count for count in self._num_steps]

    def stop(self, request: Request) -> None:
        """Let `request.waited` be the steps since `begin`."""
        request.waited = [waited + count for waited, count in zip(request.waited, self._num_steps, strict=True)]
