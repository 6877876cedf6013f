"""Supervision of a fleet: each engine that dies is started again, with growing pauses, while the others serve."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from quire.core.errors import EngineError
from quire.engine.client import EngineClient

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0        # an engine that lived for so long is started again after the first pause
MAX_FAILED_STARTS = 5   # of each engine, in a row, while none is alive


class Supervised(Protocol):
    """What supervision needs of a fleet."""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The clients of the engines by number; a restart replaces one."""

    @property
    def is_alive(self) -> bool:
        """Whether an engine answers."""

    def lose(self, number: int) -> None:
        """Forget what a dead engine had."""


async def keep_alive(
    fleet: Supervised, restart: Callable[[int], Awaitable[None]], pause: Callable[[float], Awaitable[None]]
) -> Exception:
    """Restart engines until none is alive and each has failed to start MAX_FAILED_STARTS times; return the last error.

    `restart` starts the engine of a number and returns when it is ready.
    """
    num_failed = [0] * len(fleet.engines)
    keepers = [
        asyncio.create_task(_keep(fleet, number, num_failed, restart, pause), name=f"keeper of engine {number}")
        for number in range(len(num_failed))
    ]
    try:
        done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)             # one may have to stop a loading engine


async def _keep(
    fleet: Supervised, number: int, num_failed: list[int], restart: Callable[[int], Awaitable[None]],
    pause: Callable[[float], Awaitable[None]],
) -> Exception:  # fmt: skip
    """Restart one engine whenever it dies."""
    clock, num_short_lives = asyncio.get_running_loop().time, 0
    while True:
        begun_s = clock()
        why: Exception = await fleet.engines[number].wait_dead()
        num_short_lives = num_short_lives + 1 if clock() - begun_s < HEALTHY_S else 1
        fleet.lose(number)
        num_failed[number] = 0
        while True:
            pause_s = min(FIRST_PAUSE_S * 2 ** (num_short_lives + num_failed[number] - 1), LONGEST_PAUSE_S)
            log.error("engine %d: %s; it is started again in %g s", number, why, pause_s)
            await pause(pause_s)
            try:
                await restart(number)
                break
            except (EngineError, OSError) as error:
                why = error
                num_failed[number] += 1
                if not fleet.is_alive and min(num_failed) >= MAX_FAILED_STARTS:
                    return why
        num_failed[number] = 0
        log.warning("engine %d was started again; its cached and pinned prefixes are lost", number)
