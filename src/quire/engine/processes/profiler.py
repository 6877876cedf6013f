"""Profiler of an engine process: seconds of each op of the layers, and stacks of all threads, sampled.

The thread that samples needs Python's lock: a thread in the extension is seen where it called it, and a sample that was
delayed counts for all of the time since the one before. Sampling ends by itself after MAX_SECONDS.
"""

import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from quire.engine.messages import Profile

if TYPE_CHECKING:
    from quire.model.decoder import Decoder

INTERVAL_S = 0.01
MAX_SECONDS = 600.0
MAX_FRAMES = 200      # innermost frames of a stack


class Profiler:
    """A profile that is taken from the start on. `model`: the one of which ops are timed; None: no op is."""

    def __init__(self, model: "Decoder | None" = None) -> None:
        self._model = model
        self._timer = None if model is None else model.start_timing()
        self._frames: dict[tuple[str, str, int], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._threads: dict[str, list[tuple[int, float]]] = {}
        self._is_over = threading.Event()
        self._started_s = time.monotonic()
        self._sampler = threading.Thread(target=self._sample_all, name="profiler", daemon=True)
        self._sampler.start()

    def stop(self) -> Profile:
        """Return the profile, once."""
        self._is_over.set()
        self._sampler.join()
        seconds = time.monotonic() - self._started_s
        ops = [] if self._model is None or self._timer is None else self._model.stop_timing(self._timer)
        stacks = [list(stack) for stack in self._stacks]
        return Profile(seconds, [(op.name, op.kind, op.seconds) for op in ops], [*self._frames], stacks, self._threads)

    def _sample_all(self) -> None:
        last_s = self._started_s
        while not self._is_over.wait(INTERVAL_S) and last_s - self._started_s < MAX_SECONDS:
            now_s = time.monotonic()
            self._sample(now_s - last_s)
            last_s = now_s

    def _sample(self, seconds: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        own = threading.get_ident()
        for number, frame in sys._current_frames().items():
            if number == own:
                continue
            samples = self._threads.setdefault(names.get(number, f"thread {number}"), [])
            stack = self._stack(frame)
            if samples and samples[-1][0] == stack:
                samples[-1] = stack, samples[-1][1] + seconds
            else:
                samples.append((stack, seconds))

    def _stack(self, frame: FrameType | None) -> int:
        """Return the number of a stack; its frames are numbered, outermost first."""
        found: list[int] = []
        while frame is not None and len(found) < MAX_FRAMES:
            code = frame.f_code
            key = code.co_qualname, code.co_filename, frame.f_lineno
            found.append(self._frames.setdefault(key, len(self._frames)))
            frame = frame.f_back
        return self._stacks.setdefault(tuple(found[::-1]), len(self._stacks))
