"""Finds stop strings in a text that arrives in pieces, and holds back what may still become one.

The result depends on the text alone, not on how it was cut into pieces: the matcher's state is how much of a stop
string the text ends in, and that is also what has to be held back.
"""

from quire.engine.stop_matcher import ROOT, StopMatcher


class StopStringFinder:
    """Watches the text of one sequence.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    With `include` the text ends behind it instead of before it, and nothing has to be held back.
    """

    def __init__(self, matcher: StopMatcher, *, include: bool) -> None:
        self._matcher = matcher
        self._state = ROOT
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that is now certain, and the stop string that ended it, if one did.

        Stop strings that are complete in a piece with `may_stop=False` are text like any other; one that only begins
        there counts. After a stop string nothing may be fed.
        """
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
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held
