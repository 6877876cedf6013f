"""Counters, per step, of why the head of the waiting queue was not admitted.

Requests are admitted in order, so the reason that holds back the head holds back all requests behind it, and one
counter per reason is enough: a request records the counters when it is queued, and the differences when it is admitted.
Requests that lack something, so that later ones run before them, are counted likewise, by the steps in which they do;
those that one step skips are counted one by one.
"""

from quire.core.deltas import WAIT_REASONS, WaitReason
from quire.core.sequence import Request


class WaitReasonCounters:
    """Steps that left a request waiting, by reason, since start.

    `current`: the reason in the last plan, if any; `num_skipped`: requests that it skipped.
    """

    def __init__(self) -> None:
        self._num_steps = [0] * len(WAIT_REASONS)
        self._num_before = -1  # steps before the last one
        self.current: WaitReason | None = None
        self.num_skipped = 0

    def start_step(self) -> None:
        """Begin a step."""
        self.current, self.num_skipped = None, 0
        self._num_before += 1

    def count(self, reason: WaitReason | None) -> None:
        """Count the reason that held back the head of the queue; None: nothing did."""
        if reason is not None:
            self.current = reason
            self._num_steps[WAIT_REASONS.index(reason)] += 1

    def count_skipped(self, request: Request, reason: WaitReason) -> None:
        """Count that one request was skipped."""
        self.current = reason
        self.num_skipped += 1
        request.waited[WAIT_REASONS.index(reason)] += 1

    def begin_lack(self, request: Request, reason: WaitReason) -> None:
        """Count the step under way, and those to come, for a request that lacks something."""
        request.waited[WAIT_REASONS.index(reason)] -= self._num_before

    def end_lack(self, request: Request, reason: WaitReason | None) -> None:
        """Count no more steps for a request, the one under way included. `reason`: as begun; None: nothing was."""
        if reason is not None:
            request.waited[WAIT_REASONS.index(reason)] += self._num_before

    def start(self, request: Request) -> None:
        """Start counting for a request that is queued."""
        request.waited = [-count for count in self._num_steps]

    def stop(self, request: Request) -> None:
        """Let `request.waited` be the steps since `start`."""
        request.waited = [waited + count for waited, count in zip(request.waited, self._num_steps, strict=True)]
