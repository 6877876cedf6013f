"""Watch for engines that stop making progress: a client looks at intervals, and asks an idle engine for a sign.

Looks are counted, not time: a client that was itself stopped, or whose event loop was busy, has missed looks, and no
look counts before it has read what the engine has sent meanwhile. So an engine is never ended for its client's pause.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

OnStall = Literal["ignore", "tell", "end"]
# The engine has work and makes no progress: nothing is done; idle engines are asked for signs, so that
# `stalled_s` is true of them, too; the engine is ended as well, like a dead one.

LOOKS_PER_LIMIT = 10


async def wait_for_stall(
    limit_s: float, num_signs: Callable[[], int], is_awaited: Callable[[], bool], ask: Callable[[], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:  # fmt: skip
    """Return once a sign is awaited and LOOKS_PER_LIMIT intervals in succession have brought none.

    `num_signs`: of progress, since start. `is_awaited`: the engine has work, or was asked. `ask` is called after
    `limit_s` seconds in which none was; it makes the engine send a sign as soon as it can.
    """
    seen, num_late, num_idle = num_signs(), 0, 0
    while num_late <= LOOKS_PER_LIMIT:      # the work may have begun within the first interval
        await pause(limit_s / LOOKS_PER_LIMIT)
        has_sign, seen = num_signs() != seen, num_signs()
        num_late = num_late + 1 if is_awaited() and not has_sign else 0
        num_idle = 0 if is_awaited() else num_idle + 1
        if num_idle >= LOOKS_PER_LIMIT:
            num_idle = 0
            ask()


def stall_reason(limit_s: float) -> str:
    """Return why an engine was ended that made no progress."""
    return f"the engine has work and made no progress for {limit_s:g} s (stall_limit)"
