"""Commands that a caller awaits end with their answer, with the death of the engine, or with their caller."""

import asyncio
from contextlib import suppress

import pytest

from quire.core.block_map import BlockMap, BlockOverview
from quire.core.outputs import KVStats
from quire.engine.messages import Abort, Command, EngineDeadError, GetBlocks
from quire.engine.processes.pending_commands import PendingCommands

MAP = BlockMap(0, KVStats(16, 1, 0, 0, 1, 0, 0, 0), [], [], BlockOverview(1, [0], [0], [None]))


def test_one_block_map_is_asked_for_at_a_time() -> None:
    async def run() -> None:
        sent: list[Command] = []
        pending = PendingCommands(sent.append)
        asking = [asyncio.create_task(pending.block_map(0, 1, "kv", lambda: None)) for _ in range(3)]
        for number in range(3):
            while len(sent) == number:
                await asyncio.sleep(0)
            assert sent[number:] == [GetBlocks(number, 0, 1, "kv")]
            pending.resolve(sent[number], MAP)
        assert await asyncio.gather(*asking) == [MAP] * 3
        assert len(pending) == 0

    asyncio.run(run())


def test_unpinning_ends_when_the_request_is_no_longer_pinned() -> None:
    async def run() -> None:
        pending = PendingCommands(lambda command: None)
        first, second = (asyncio.create_task(pending.unpin(request_id)) for request_id in (-1, -2))
        await asyncio.sleep(0)
        pending.resolve_unpinned([-1, -2])
        await asyncio.sleep(0)
        assert len(pending) == 2
        pending.resolve_unpinned([-2])
        await first
        assert not second.done()
        pending.resolve_unpinned([])
        await second

    asyncio.run(run())


def test_dead_engine_fails_every_caller() -> None:
    async def run() -> None:
        pending = PendingCommands(lambda command: None)
        asking = asyncio.create_task(pending.unpin(-1))
        await asyncio.sleep(0)
        pending.fail_all("the engine is gone")
        with pytest.raises(EngineDeadError, match="the engine is gone"):
            await asking
        assert len(pending) == 0

    asyncio.run(run())


def test_answer_to_a_caller_that_was_cancelled_is_dropped() -> None:
    async def run() -> None:
        pending = PendingCommands(lambda command: None)
        asking = asyncio.create_task(pending.unpin(-1))
        await asyncio.sleep(0)
        asking.cancel()
        pending.resolve(Abort(-1))
        with suppress(asyncio.CancelledError):
            await asking
        pending.resolve(Abort(-1))
        assert len(pending) == 0

    asyncio.run(run())
