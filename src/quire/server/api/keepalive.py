"""Keepalive comments in an idle event stream, so that no proxy closes it.

A request may wait, be prefilled or be preempted for longer than the idle timeout of a load balancer. Clients of
server-sent events ignore comments.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

KEEPALIVE = b": keepalive\n\n"


class Keepalive:
    """Calls `send` whenever nothing was written for `interval_s`, never within an event; 0: never."""

    def __init__(self, interval_s: float, send: Callable[[], Awaitable[None]]) -> None:
        self._interval_s, self._send = interval_s, send
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()                  # when the last event was written
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._arm(self._interval_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def write(self, event: Awaitable[None]) -> None:
        """Await the writing of an event; no comment and no other event is written between its pieces."""
        async with self._writing:
            await event
            self._last_s = self._loop.time()

    def _arm(self, delay_s: float) -> None:
        if self._interval_s:
            self._timer = self._loop.call_later(delay_s, self._send_if_idle)

    def _send_if_idle(self) -> None:
        """Send a comment, unless an event was written meanwhile or is being written."""
        due_s = self._last_s + self._interval_s - self._loop.time()
        if due_s <= 0 and not self._writing.locked():
            self._sending = self._loop.create_task(self._send_comment())
        self._arm(due_s if due_s > 0 else self._interval_s)

    async def _send_comment(self) -> None:
        await self.write(self._send())
