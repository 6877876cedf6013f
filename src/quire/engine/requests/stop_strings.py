"""Stop-string search in text that arrives in pieces; text that may still become a stop string is held back.

The result depends on the text alone, not on how it was cut into pieces: the matcher's state is the length of the stop
string's prefix in which the text ends, which is also the text to hold back.
"""

from array import array
from collections.abc import Sequence

from quire.engine.requests.reasoning_gate import ReasoningGate, ReasoningMarkers

ROOT = 0        # the state of a text that ends in no prefix of a stop string
_UNKNOWN = -1


class StopMatcher:
    """Transitions between states. Immutable to its users; computed states are cached."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self._width = 1 + max(map(len, self._stops), default=0)
        self._firsts = {stop[0]: number * self._width + 1 for number, stop in reversed([*enumerate(self._stops)])}
        self._first_chars = frozenset(self._firsts)
        # How many characters a stop string shares with the one before it; those states belong to the one before.
        self._shared = [0, *map(_num_shared, self._stops, self._stops[1:]), 0]
        self._failures: list[array[int] | None] = [None] * len(self._stops)
        self._complete: list[array[int] | None] = [None] * len(self._stops)

    def advance(self, state: int, piece: str, *, may_stop: bool) -> tuple[int, int, str | None]:
        """Follow `piece` from a state; return the next state, the end of a stop string in `piece`, and that string.

        Of two that end with the same character the longer one. Without `may_stop`, stop strings are passed over.
        """
        if not state and self._first_chars.isdisjoint(piece):
            return ROOT, 0, None
        for position, char in enumerate(piece):
            state = self._next(state, char)
            complete = self._complete_at(state) if state else _UNKNOWN
            if complete >= 0:
                if may_stop:
                    return state, position + 1, self._stops[complete]
                state = self._without_complete(state)
        return state, 0, None

    def depth(self, state: int) -> int:
        """Return how many characters at the end of the text may begin a stop string."""
        return state % self._width

    def _next(self, state: int, char: str) -> int:
        while True:
            child = self._child(state, char)
            if child or not state:
                return child
            state = self._failure(state)

    def _child(self, state: int, char: str) -> int:
        """Return the state one character deeper, ROOT if no stop string continues with `char`."""
        if not state:
            return self._firsts.get(char, ROOT)
        stop, depth = divmod(state, self._width)
        if self._shared[stop + 1] < depth:  # no other stop string has this prefix
            text = self._stops[stop]
            return state + 1 if depth < len(text) and text[depth] == char else ROOT
        while True:
            text = self._stops[stop]
            if depth < len(text) and text[depth] == char:
                return stop * self._width + depth + 1
            stop += 1
            while self._shared[stop] > depth:  # they go on alike
                stop += 1
            if self._shared[stop] < depth:
                return ROOT

    def _without_complete(self, state: int) -> int:
        """Return the longest suffix that is a proper prefix of a stop string."""
        while state:
            stop, depth = divmod(state, self._width)
            if depth < len(self._stops[stop]) or self._shared[stop + 1] >= depth:
                break
            state = self._failure(state)
        return state

    # --- failure links, computed when they are first followed ---------------------------------------------------------

    def _failure(self, state: int) -> int:
        """Return the longest proper suffix of a state that is a state."""
        return self._known(state, self._failures)

    def _complete_at(self, state: int) -> int:
        """Return the longest stop string that ends here, _UNKNOWN if none does."""
        stop, depth = divmod(state, self._width)
        if depth == len(self._stops[stop]):
            return stop
        return self._known(state, self._complete)

    def _known(self, state: int, table: "list[array[int] | None]") -> int:
        if not self._has(state):
            self._compute(state)
        stop, depth = divmod(state, self._width)
        own = table[stop]
        assert own is not None, "computed and not there"
        return own[depth - 1 - self._shared[stop]]

    def _has(self, state: int) -> bool:
        stop, depth = divmod(state, self._width)
        own = self._failures[stop]
        return own is not None and own[depth - 1 - self._shared[stop]] != _UNKNOWN

    def _compute(self, state: int) -> None:
        """Compute the failure link of a state, after those that it follows from: a stack instead of recursion."""
        pending = [state]
        while pending:
            missing = None if self._has(pending[-1]) else self._link(pending[-1])
            if missing is None:
                pending.pop()
            else:
                pending.append(missing)

    def _link(self, state: int) -> int | None:
        """Set the failure link of a state, or return a state that needs its own link first."""
        stop, depth = divmod(state, self._width)
        char, parent = self._stops[stop][depth - 1], self._parent(stop, depth)
        failure = ROOT
        while parent:  # at depth 1 the only proper suffix is empty
            if not self._has(parent):
                return parent
            parent = self._failure(parent)
            failure = self._child(parent, char)
            if failure:
                break
        if failure and not self._has(failure):
            return failure
        self._set(stop, depth, failure)
        return None

    def _parent(self, stop: int, depth: int) -> int:
        """Return the state one character shallower: of the first stop string that has it."""
        while depth > 1 and self._shared[stop] >= depth - 1:
            stop -= 1
        return stop * self._width + depth - 1 if depth > 1 else ROOT

    def _set(self, stop: int, depth: int, failure: int) -> None:
        failures, complete = self._failures[stop], self._complete[stop]
        if failures is None or complete is None:
            own = len(self._stops[stop]) - self._shared[stop]
            failures = self._failures[stop] = array("q", [_UNKNOWN]) * own
            complete = self._complete[stop] = array("i", [_UNKNOWN]) * own
        complete[depth - 1 - self._shared[stop]] = self._complete_at(failure) if failure else _UNKNOWN
        failures[depth - 1 - self._shared[stop]] = failure


def _num_shared(first: str, second: str) -> int:
    """Return the length of the longest common prefix, by bisection: comparing prefixes is one call for each."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class StopStringFinder:
    """Search in the text of one sequence.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    With `include` the text ends behind it instead of before it, and nothing has to be held back. `reasoning` is not
    searched.
    """

    def __init__(self, matcher: StopMatcher, *, include: bool, reasoning: ReasoningMarkers | None = None) -> None:
        self._matcher = matcher
        self._gate = None if reasoning is None else ReasoningGate(reasoning)
        self._state = ROOT
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, may_stop: bool = True, is_last: bool = False) -> tuple[str, str | None]:
        """Append a piece; return the text that is now certain, and the stop string that ended it, or None.

        Stop strings that are complete in a piece with `may_stop=False` are text like any other; one that only begins
        there counts. Nothing may be fed after a stop string. `is_last`: nothing follows the piece.
        """
        if self._gate is None:
            return self._searched(piece, may_stop=may_stop)
        certain: list[str] = []
        for part, is_searched in self._gate.split(piece, is_last=is_last):
            text, stop = self._searched(part, may_stop=may_stop) if is_searched else (self.flush() + part, None)
            certain.append(text)
            if stop is not None:
                return "".join(certain), stop
        return "".join(certain), None

    def _searched(self, piece: str, *, may_stop: bool) -> tuple[str, str | None]:
        self._state, end, stop = self._matcher.advance(self._state, piece, may_stop=may_stop)
        if stop is not None:
            if self._include:
                return piece[:end], stop
            return (self._held + piece[:end])[: -len(stop)], stop
        if self._include:
            return piece, None
        text = self._held + piece
        num_certain = len(text) - self._matcher.depth(self._state)
        self._held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence, or of a part that no stop string spans."""
        held, self._held, self._state = self._held, "", ROOT
        return held
