"""Turns of the event loop for work that takes longer than one of them may."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

T = TypeVar("T")

# Work of one turn: bytes of JSON (1 to 5 ms of writing logprobs), and units of anything else, of some 2 us each.
MAX_SLICE_BYTES = 32 << 10
MAX_SLICE_UNITS = 1024


class TimeSlices:
    """One slice of long work per iteration of the event loop, however many requests have some, in order of arrival.

    Short work is done at once and never waits here.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next_slice(self) -> None:
        """Wait until it is the caller's turn; the turn ends when the caller waits for anything."""
        async with self._lock:
            await asyncio.sleep(0)

    async def iterate(self, slices: Iterator[T]) -> AsyncIterator[T]:
        """Yield what `slices` yields, and compute each in a turn of its own."""
        while True:
            async with self._lock:
                await asyncio.sleep(0)
                try:
                    made = next(slices)
                except StopIteration:
                    return
            yield made
