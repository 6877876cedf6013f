"""Stop-string search in text that arrives in pieces; text that may still become a stop string is held back.

The result depends on the text alone, not on how it was cut into pieces: the matcher's state is the length of the stop
string's prefix in which the text ends, which is also the text to hold back.
"""

from quire.engine.reasoning_gate import ReasoningGate, ReasoningMarkers
from quire.engine.stop_matcher import ROOT, StopMatcher


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
