"""Keeps an engine behind the server: one that dies is replaced, so many times, each time after a longer pause.

The new engine takes over the settings and goes on with the requests' numbers. What the old one held is gone: open
requests have ended with an error, and nothing is cached or pinned.
"""

import asyncio
import logging

from quire.core.errors import EngineError
from quire.engine.child import EngineChild
from quire.engine.client import EngineClient
from quire.engine.options import EngineOptions
from quire.server.service import Service
from quire.server.stop_signals import StopSignals

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


async def keep_engine(service: Service, options: EngineOptions, signals: StopSignals) -> Exception:
    """Wait until there is no engine any more, and why: the last one that is granted has died, or has not come."""
    num_granted = service.options.restart_engine
    why: Exception = await service.client.death()
    for number in range(1, num_granted + 1):
        pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
        log.error("%s; engine %d of %d more is started in %g s (restart_engine)", why, number, num_granted, pause_s)
        service.metrics.engine_ended()
        await asyncio.sleep(pause_s)
        try:
            signals.child = EngineChild.spawn(options)
            service.client = await EngineClient.connect(
                signals.child, options, service.metrics, service.client.request_ids
            )
        except (EngineError, OSError) as error:
            why = error
            continue
        log.warning("a new engine serves; what was cached or pinned is gone")
        why = await service.client.death()
    return why
