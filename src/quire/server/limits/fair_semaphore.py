"""Fairness between clients: slots of a scarce resource in rotation, and time slices on the event loop.

A client with a hundred jobs gets one slot for each slot of a client with one job. Long jobs have a lane of their own,
so that short jobs never wait for them. Lives on the event loop. Threads that prepare requests are shared so.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

LONG_CHARS = 1 << 17  # a longer text takes a quarter of a second, up to eight seconds


class FairSemaphore:
    """A number of slots, each for one job at a time."""

    def __init__(self, num_slots: int = 1) -> None:
        self._num_free = num_slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # client -> jobs; the next client first

    @property
    def is_full(self) -> bool:
        """Return whether the next job would have to wait."""
        return not self._num_free

    @asynccontextmanager
    async def slot(self, client_id: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        await self._acquire(client_id)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, client_id: str) -> None:
        if not self.is_full:
            self._num_free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client_id, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._remove(client_id, granted)
            else:
                self._release()                   # granted in the same iteration
            raise

    def _release(self) -> None:
        """Grant the slot to the next client, which then is the last of the rotation."""
        while self._waiting:
            client_id = next(iter(self._waiting))
            jobs = self._waiting.pop(client_id)
            granted = jobs.popleft()
            if jobs:
                self._waiting[client_id] = jobs
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

    def _remove(self, client_id: str, granted: asyncio.Future[None]) -> None:
        jobs = self._waiting.get(client_id, deque())
        if granted in jobs:
            jobs.remove(granted)
        if not jobs:
            self._waiting.pop(client_id, None)


class Lanes:
    """Slots for short jobs and slots for long ones."""

    def __init__(self, num_short: int = 1, num_long: int = 1) -> None:
        self.short, self.long = FairSemaphore(num_short), FairSemaphore(num_long)

    def slot(self, client_id: str, *, is_long: bool) -> AbstractAsyncContextManager[None]:
        """Return a context that holds a slot of the job's lane."""
        return (self.long if is_long else self.short).slot(client_id)


class PreparationThreads:
    """Two threads for short work and one for long: long prompts may delay each other, but no short ones."""

    def __init__(self) -> None:
        self.short, self.long = ThreadPoolExecutor(2, "prepare"), ThreadPoolExecutor(1, "prepare long")
        self._lanes = Lanes(num_short=2, num_long=1)

    async def run(self, num_chars: int, work: Callable[[], T], client_id: str = "") -> T:
        """Return what `work` returns, called in a thread for so many characters or token ids."""
        is_long = num_chars > LONG_CHARS
        threads = self.long if is_long else self.short
        async with self._lanes.slot(client_id, is_long=is_long):
            return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Wait for the work in progress, and end the threads."""
        self.short.shutdown()
        self.long.shutdown()


# Work of one slice: bytes of JSON (1 to 5 ms of encoding logprobs), or units of some 2 us of anything else.
MAX_SLICE_BYTES = 32 << 10
MAX_SLICE_UNITS = 1024


class TimeSlices:
    """One slice of long work per iteration of the event loop, however many requests have some, in order of arrival.

    Short work is done at once, without a slice.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next_slice(self) -> None:
        """Wait for the next slice of the caller, which ends at its next await."""
        async with self._lock:
            await asyncio.sleep(0)

    async def iterate(self, slices: Iterator[T]) -> AsyncIterator[T]:
        """Yield what `slices` yields, each computed in a slice of its own."""
        while True:
            async with self._lock:
                await asyncio.sleep(0)
                try:
                    made = next(slices)
                except StopIteration:
                    return
            yield made


async def run_sliced(slices: Generator[None, None, T]) -> T:
    """Return what a generator returns, with an iteration of the event loop after each slice."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def run_at_once(slices: Generator[None, None, T]) -> T:
    """Return what a generator returns."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
