"""Commands to the engine with effects that a caller awaits: unpinning, and block maps."""

import asyncio
import itertools
from collections.abc import Callable, Collection
from typing import Any

from quire.core.block_map import BlockMap, Tier
from quire.engine.messages import (
    Abort,
    AdapterReply,
    Command,
    EngineDeadError,
    GetBlocks,
    OpenSession,
    ProfileReply,
    ReadAdapter,
    SaveSession,
    SessionBlocks,
    SessionReply,
    Sleep,
    SleepReply,
    StartProfile,
    StopProfile,
    Tag,
    Wake,
)


class PendingCommands:
    """Futures of the commands that were sent and not answered. Lives on one event loop."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self.futures: dict[Command, asyncio.Future[Any]] = {}
        self._map_numbers, self._adapter_numbers = itertools.count(), itertools.count()
        self._profile_numbers, self._sleep_numbers = itertools.count(), itertools.count()
        self._session_numbers = itertools.count()
        self._map_lock = asyncio.Lock()      # the engine is asked for one map at a time: each costs a step some time

    def __len__(self) -> int:
        """Count the commands that are awaited."""
        return len(self.futures)

    async def unpin(self, request_id: int) -> None:
        """Release what a request has pinned; returns once its blocks are free."""
        await self._request(Abort(request_id))

    async def block_map(self, first: int, count: int, tier: Tier, check: Callable[[], None]) -> BlockMap:
        """Return blocks [first, first + count) of a tier. `check` raises if there is no engine when its turn comes."""
        async with self._map_lock:
            check()
            block_map: BlockMap = await self._request(GetBlocks(next(self._map_numbers), first, count, tier))
            return block_map

    async def read_adapter(self, folder: str) -> AdapterReply:
        """Have the LoRA adapter of a folder read; return the answer."""
        reply: AdapterReply = await self._request(ReadAdapter(next(self._adapter_numbers), folder))
        return reply

    async def profile(self, kind: type[StartProfile | StopProfile]) -> ProfileReply:
        """Start or end a profile; return the answer."""
        reply: ProfileReply = await self._request(kind(next(self._profile_numbers)))
        return reply

    async def sleep(self, level: int) -> SleepReply:
        """Let the engine sleep; return the answer."""
        reply: SleepReply = await self._request(Sleep(next(self._sleep_numbers), level))
        return reply

    async def wake(self, tags: tuple[Tag, ...]) -> SleepReply:
        """Wake the engine; return the answer."""
        reply: SleepReply = await self._request(Wake(next(self._sleep_numbers), tags))
        return reply

    async def save_session(self, request_id: int, folder: str) -> SessionBlocks:
        """Have what a request has pinned saved; return what has become of it."""
        reply: SessionReply = await self._request(SaveSession(next(self._session_numbers), request_id, folder))
        return reply.blocks

    async def open_session(self, request_id: int, folder: str, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request load from a saved session; return what has become of it."""
        command = OpenSession(next(self._session_numbers), request_id, folder, num_blocks, identity)
        reply: SessionReply = await self._request(command)
        return reply.blocks

    async def _request(self, command: Command) -> Any:  # noqa: ANN401 (whatever the engine answers)
        future = self.futures[command] = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            return await future
        finally:
            del self.futures[command]

    def resolve(self, command: Command, answer: object = None) -> None:
        """Return an answer to the caller of a command, unless it was cancelled."""
        future = self.futures.get(command)
        if future is not None and not future.done():
            future.set_result(answer)

    def resolve_unpinned(self, pins: Collection[int]) -> None:
        """Resolve each `unpin` of a request that is no longer among the pinned ones."""
        left = set(pins)
        for command in self.futures:
            if isinstance(command, Abort) and command.request_id not in left:
                self.resolve(command)

    def fail_all(self, reason: str) -> None:
        """Raise EngineDeadError in every caller."""
        for future in self.futures.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
