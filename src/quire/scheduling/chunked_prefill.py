"""How the token budget of a step is shared: a long prompt must not stall the rest.

A long prompt is computed in chunks (Agrawal et al. 2024), and the chunk of a step leaves to others what they can use of
the other half of the budget. So whoever has little to compute waits for a step or two, not for the whole prompt, and
where nobody else has anything to do, long prompts take all.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from quire.core.sequence import Request

_MAX_LOOKED_AT = 512  # requests that count as others: more say no more than that there is a crowd
_MAX_PASSED = 8       # long prompts in a step that shorter ones behind them pass: each is looked up in the cache


class ChunkedPrefillBudget:
    """The part of each step's budget that goes to sequences with more than half a budget to compute."""

    def __init__(self, budget: int, others: Callable[[], Iterator[Request]]) -> None:
        self._budget, self._others = budget, others
        self._left: int | None = None       # of this step's part; None: no long prompt was met yet
        self._num_passed = 0

    def start_step(self) -> None:
        """Begin a step."""
        self._left, self._num_passed = None, 0

    def may_be_passed(self) -> bool:
        """Whether those behind one more long prompt that got nothing may be let in before it."""
        self._num_passed += 1
        return self._num_passed <= _MAX_PASSED

    def share(self, num_missing: int, budget: int) -> int:
        """Return how many tokens of what is left of the step's budget a sequence may use that has so many to compute.

        The first long one of a step gets at least one; others may get none.
        """
        if num_missing <= max(1, self._budget // 2):
            return budget
        if self._left is None:
            self._left = self._budget - self._wanted_by_others(self._budget // 2)
        granted = min(num_missing, budget, self._left)
        self._left -= granted
        return granted

    def _wanted_by_others(self, most: int) -> int:
        """Count the tokens that requests with little to compute could use now, up to `most`."""
        wanted = 0
        for request in islice(self._others(), _MAX_LOOKED_AT):
            sequence = request.live[0]
            num_missing = sequence.num_tokens - sequence.num_computed_tokens
            if num_missing <= max(1, self._budget // 2):
                wanted += num_missing + len(request.live) - 1
            if wanted >= most:
                return most
        return wanted
