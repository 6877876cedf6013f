"""Threads for tokenizing prompts and other work of more than a millisecond, shared fairly by the clients."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.server.limits.fair_semaphore import Lanes

T = TypeVar("T")

LONG_CHARS = 1 << 17  # a longer text takes a quarter of a second, up to eight seconds


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
