"""Looks whether the engine gets on with its work, and tells the log where it stands if it does not."""

import asyncio
import faulthandler
import logging
import sys

from quire.server.service import Service

log = logging.getLogger(__name__)

LOOKS_PER_LIMIT = 4


async def watch_for_stalls(service: Service) -> None:
    """Log each stall once, with the stacks of all threads of both processes, and its end. Runs until cancelled."""
    is_stalled, limit_s = False, service.options.stall_limit
    while True:
        await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
        client = service.client  # may be another one each time
        was_stalled, is_stalled = is_stalled, client.stalled_s > limit_s
        if is_stalled and not was_stalled:
            log.error("the engine has work and made no progress for %g seconds (stall_limit)", limit_s)
            if sys.stderr is not None:  # closed, if whoever started us wanted it so
                faulthandler.dump_traceback()
            client.log_stacks()
        elif was_stalled and not is_stalled:
            log.warning("the engine goes on")
