"""Work between two turns of an event loop, in units that no busy machine changes.

A unit is a call of a function, of Python or C, or 256 bytes of what a function of Python returns. Counted by the
interpreter's profiling hook in the loop's own thread, between callbacks that the loop runs once in each of its turns.
"""

import sys
from asyncio import AbstractEventLoop
from collections import Counter
from types import CodeType, FrameType

UNIT_BYTES = 256
_SIZED = (bytes, bytearray, str)


class LoopMeter:
    """Counts from `start` to `stop`, both called on the loop."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.num_turns = self.most_units = 0
        self.most_called: list[tuple[str, int]] = []   # units in the turn with the most
        self._loop, self._is_on = loop, False
        self._num_units = 0
        self._calls: Counter[CodeType | str] = Counter()

    def start(self) -> None:
        """Count from the next turn on."""
        self._is_on = True
        self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Count no more."""
        self._is_on = False
        sys.setprofile(None)

    def _turn(self) -> None:
        sys.setprofile(None)
        self.num_turns += 1
        if self._num_units > self.most_units:
            self.most_units = self._num_units
            self.most_called = [(_name(code), count) for code, count in self._calls.most_common(12)]
        self._num_units = 0
        self._calls.clear()
        if self._is_on:
            self._loop.call_soon(self._turn)
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return":
            if isinstance(argument, _SIZED):
                self._num_units += len(argument) // UNIT_BYTES
            return
        if event in ("call", "c_call"):
            self._num_units += 1
            self._calls[frame.f_code if event == "call" else f"{argument!r:.60}"] += 1


def _name(code: CodeType | str) -> str:
    return code if isinstance(code, str) else f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
