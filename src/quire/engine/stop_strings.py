"""Finds stop strings in a text that arrives in pieces, and holds back what may still become one.

The result depends on the text alone, not on how it was cut into pieces: each stop string has an automaton (Knuth,
Morris and Pratt 1977) that knows how much of it the text ends in. That length is also what has to be held back. One
look at each character and stop string, however long the string is.
"""

from collections.abc import Sequence
from functools import lru_cache

_NEVER = 1 << 62  # behind the end of any text


@lru_cache(maxsize=1024)  # every branch of every request of a call has the same stop strings
def border_lengths(text: str) -> tuple[int, ...]:
    """Return, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    lengths, length = [0], 0
    for char in text[1:]:
        while length and char != text[length]:
            length = lengths[length - 1]
        length += char == text[length]
        lengths.append(length)
    return tuple(lengths)


class StopStringFinder:
    """Watches the text of one sequence.

    The stop string that is complete first ends the text; of two that end with the same character, the longer one.
    With `include` the text ends behind it instead of before it, and nothing has to be held back. Without `stops` the
    text goes through.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that is now certain, and the stop string that ended it, if one did.

        Stop strings that are complete in a piece with `may_stop=False` are text like any other; one that only begins
        there counts. After a stop string nothing may be fed.
        """
        ends = [automaton.advance(piece, may_stop) for automaton in self._automata]
        end = min(ends, default=_NEVER)
        if end < _NEVER:
            complete = [each.stop for each, own in zip(self._automata, ends, strict=True) if own == end]
            stop = max(complete, key=len)
            if self._include:
                return piece[:end], stop
            return (self._held + piece[:end])[: -len(stop)], stop
        if self._include:
            return piece, None
        text = self._held + piece
        num_certain = len(text) - max((automaton.matched for automaton in self._automata), default=0)
        self._held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How far one stop string has been matched: `matched` of its characters are the end of the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = border_lengths(stop)
        self.matched = 0

    def advance(self, piece: str, may_stop: bool) -> int:
        """Take the next piece; return where in it the first match ends, if that is allowed to count, or _NEVER."""
        stop, borders, matched = self.stop, self._borders, self.matched
        if not matched and stop[0] not in piece:
            return _NEVER
        for position, char in enumerate(piece):
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                if may_stop:
                    return position + 1
                matched = borders[-1]
        self.matched = matched
        return _NEVER
