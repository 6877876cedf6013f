"""Time slices on the event loop for work that takes longer than one iteration may."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

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
