"""Looks whether the engine gets on with its work, and tells the log where it stands if it does not."""

import asyncio
import faulthandler
import logging
import sys

from quire.engine.client import EngineClient

log = logging.getLogger(__name__)

LOOKS_PER_LIMIT = 4


async def watch_for_stalls(client: EngineClient, limit_s: float) -> None:
    """Log each stall once, with the stacks of all threads of both processes, and its end. Runs until cancelled."""
    is_stalled = False
    while True:
        await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
        was_stalled, is_stalled = is_stalled, client.stalled_s > limit_s
        if is_stalled and not was_stalled:
            log.error("the engine has work and made no progress for %g seconds (stall_limit)", limit_s)
            if sys.stderr is not None:  # closed, if whoever started us wanted it so
                faulthandler.dump_traceback()
            client.log_stacks()
        elif was_stalled and not is_stalled:
            log.warning("the engine goes on")
