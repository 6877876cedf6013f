"""Stop strings in text that comes in pieces: where an answer ends, and what may be shown before that is known."""

from typing import NamedTuple


class Found(NamedTuple):
    """What a piece of text led to: text that is safe to show, and the stop string that ended it, if one did."""

    shown: str
    stop: str | None


class StopStringSearch:
    """Looks for the stop string that is complete first; of two complete at the same character, the longer one.

    How the text is cut into pieces changes nothing. Text that may be the beginning of a stop string is held back, so
    that no part of one is ever shown.
    """

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool) -> None:
        self._stops = stops
        self._keep_stop = keep_stop
        self._held = ""

    def feed(self, text: str) -> Found:
        """Take the next piece of text. After a stop string was found, nothing more may be fed."""
        text = self._held + text
        hits = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if hits:
            end, begin, stop = min(hits)
            self._held = ""
            return Found(text[: end if self._keep_stop else begin], stop)
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return Found(shown, None)

    def finish(self) -> str:
        """Return what was held back: the answer is over, and no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
