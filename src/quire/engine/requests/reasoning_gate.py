"""Search for the reasoning in an output's text: stop strings are looked for behind it alone.

The text may come in any pieces. What may still become a marker is held back, at most the length of one; so are blanks
in front of the first marker.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_BLANKS = 256  # blanks before the reasoning; an output with more of them has none


class ReasoningMarkers(NamedTuple):
    """Texts around the reasoning of an output.

    `is_open`: the output begins inside of it. `recurs`: there may be several stretches of it, at any place; else there
    is one, in front of everything else.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool = False
    recurs: bool = False


class ReasoningGate:
    """Splits the text of one output into reasoning and the rest. Markers, and blanks behind them, are reasoning."""

    def __init__(self, markers: ReasoningMarkers) -> None:
        self._markers = markers
        self._held = ""
        self._is_inside = markers.is_open
        self._skips_blanks = False
        self._is_over = False  # no reasoning follows

    def split(self, text: str, *, is_last: bool = False) -> Iterator[tuple[str, bool]]:
        """Yield the next texts that are certain, each with True if it is no reasoning. `is_last`: nothing follows."""
        text, self._held = self._held + text, ""
        while text:
            if self._is_over:
                yield text, True
                return
            if self._skips_blanks:
                rest = text.lstrip()
                self._skips_blanks, self._is_over = not rest, bool(rest) and not self._markers.recurs
                if len(rest) < len(text):
                    yield text[: len(text) - len(rest)], False
                text = rest
            elif self._is_inside or self._markers.recurs:
                found, stop = _first(text, self._markers.ends if self._is_inside else self._markers.starts)
                if found < 0:
                    stop = len(text) if is_last else stop
                    if stop:
                        yield text[:stop], not self._is_inside
                    self._held = text[stop:]
                    return
                if found and not self._is_inside:
                    yield text[:found], True
                yield text[0 if self._is_inside else found : stop], False
                self._skips_blanks, self._is_inside = self._is_inside, not self._is_inside
                text = text[stop:]
            else:
                begun = text.lstrip()
                self._is_inside = begun.startswith(self._markers.starts)
                may_begin = len(text) <= MAX_BLANKS and any(start.startswith(begun) for start in self._markers.starts)
                if not self._is_inside and may_begin and not is_last:
                    self._held = text
                    return
                self._is_over = not self._is_inside


def _first(text: str, markers: Sequence[str]) -> tuple[int, int]:
    """Return the start and the end of the first marker; -1 and the place up to which there is certainly none."""
    found = min(((at, -len(marker)) for marker in markers if (at := text.find(marker)) >= 0), default=None)
    if found is not None:
        return found[0], found[0] - found[1]
    longest = max(map(len, markers))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return -1, start
    return -1, len(text)
