"""Stop-string search in text that arrives in pieces; text that may still become a stop string is held back.

The result depends on the text alone, not on how it was cut into pieces: the matcher's state is the length of the stop
string's prefix in which the text ends, which is also the text to hold back.
"""

from quire.engine.stop_matcher import ROOT, StopMatcher


class StopStringFinder:
    """Search in the text of one sequence.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    With `include` the text ends behind it instead of before it, and nothing has to be held back.
    """

    def __init__(self, matcher: StopMatcher, *, include: bool) -> None:
        self._matcher = matcher
        self._state = ROOT
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Append a piece; return the text that is now certain, and the stop string that ended it, or None.

        Stop strings that are complete in a piece with `may_stop=False` are text like any other; one that only begins
        there counts. Nothing may be fed after a stop string.
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
        """Return the text that was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held
