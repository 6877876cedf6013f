"""Counter of function calls, for tests of how work grows: calls do not depend on the machine, as times do."""

import gc
import sys
from types import FrameType, TracebackType


class CountedCalls:
    """Context in which the calls of functions, those written in C included, are counted in the current thread.

    No garbage is collected meanwhile: it would call finalizers of other tests' objects.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "CountedCalls":
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")
