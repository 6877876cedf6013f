"""Engine supervisor: restarts a dead engine up to `restart_engine` times with growing pauses, and logs stalls.

With `restart_engine` an engine that makes no progress for the stall limit is ended by its client, and so dies; without
it the server stays unhealthy until the engine goes on, or the operator ends it.

The new engine has the same options and continues the numbering of requests. The state of the old one is lost: its
requests have failed, and nothing is cached or pinned. A stall is logged with the stacks of all threads.
"""

import asyncio
import faulthandler
import logging
import sys
from collections.abc import Awaitable, Callable

from quire.core.errors import EngineError
from quire.engine.launcher import EngineProcess
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.server.service import Service
from quire.server.signals import StopSignals

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CHECKS_PER_LIMIT = 4


async def supervise_engine(
    service: Service,
    options: EngineOptions,
    signals: StopSignals,
    *,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    spawn: Callable[[EngineOptions], EngineProcess] = EngineProcess.spawn,
) -> Exception:
    """Restart the only engine whenever it dies; return the last error when no restart is left.

    `pause` waits before each start, and `spawn` starts the process.
    """
    num_granted = service.options.restart_engine
    (client,), (metrics,) = service.client.engines, service.metrics.engines
    why: Exception = await client.wait_dead()
    for number in range(1, num_granted + 1):
        pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
        log.error("%s; restart %d of %d in %g s (restart_engine)", why, number, num_granted, pause_s)
        metrics.engine_died()
        await pause(pause_s)
        try:
            signals.children[0] = spawn(options)
            service.client = client = await EngineClient.connect(
                signals.children[0], options, metrics, client.request_ids, client.inputs.owners,
                service.options.start_timeout, on_stall="end",
            )  # fmt: skip
        except (EngineError, OSError) as error:
            why = error
            continue
        metrics.engine_restarted()
        log.warning("the engine was restarted; cached and pinned prefixes are lost")
        why = await client.wait_dead()
    return why


async def watch_for_stalls(service: Service) -> None:
    """Log the start of each stall, with the stacks of all threads of both processes, and its end, until cancelled."""
    stalled, limit_s = set[int](), service.options.stall_limit
    while True:
        await asyncio.sleep(limit_s / CHECKS_PER_LIMIT)
        engines = service.client.engines  # replaced by restarts
        for number, engine in enumerate(engines):
            name = "the engine" if len(engines) == 1 else f"engine {number}"
            is_stalled = engine.stalled_s > limit_s
            if is_stalled and number not in stalled:
                stalled.add(number)
                log.error("%s has work and made no progress for %g seconds (stall_limit)", name, limit_s)
                if sys.stderr is not None:  # None if the process was started without it
                    faulthandler.dump_traceback()
                engine.log_stacks()
            elif number in stalled and not is_stalled:
                stalled.remove(number)
                log.warning("%s makes progress again", name)
