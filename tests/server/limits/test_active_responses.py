"""Answers end when they are done, when their client goes, and when the server ends."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from quire.server.errors import ApiError, shutting_down
from quire.server.limits.active_responses import ActiveResponses, ClientDisconnectedError


class Connection:
    """A client that stays until it is told to go."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Work:
    """Work that takes until it is told to end, and remembers how it ended."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> str:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


def play(scene: Callable[[ActiveResponses, Connection, Work], Awaitable[None]]) -> Work:
    """Run a scene; nothing may be open after it."""

    async def run() -> Work:
        answers, connection, work = ActiveResponses(), Connection(), Work()
        await scene(answers, connection, work)
        assert len(answers) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return work

    return asyncio.run(run())


def test_work_that_ends_gives_its_result() -> None:
    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        work.may_end.set()
        assert await answers.run(work.run(), {}, connection.receive) == "done"

    play(scene)


def test_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        with pytest.raises(KeyError):
            await answers.run(fail(), {}, connection.receive)

    play(scene)


def test_client_that_goes_ends_the_work() -> None:
    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        running = asyncio.create_task(answers.run(work.run(), {}, connection.receive))
        await work.begun.wait()
        assert len(answers) == 1
        connection.gone.set()
        with pytest.raises(ClientDisconnectedError):
            await running

    assert play(scene).was_cancelled


def test_end_of_the_server_ends_all_work_with_its_error() -> None:
    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        running = [asyncio.create_task(answers.run(work.run(), {}, connection.receive)) for _ in range(3)]
        await work.begun.wait()
        answers.cancel_all(shutting_down())
        answers.cancel_all(ApiError(500, "too late"))
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [error.code for error in errors if isinstance(error, ApiError)] == ["shutting_down"] * 3

    assert play(scene).was_cancelled


def test_cancelled_answer_takes_its_work_with_it() -> None:
    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        running = asyncio.create_task(answers.run(work.run(), {}, connection.receive))
        await work.begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    assert play(scene).was_cancelled


def test_result_that_is_there_wins_over_the_end() -> None:
    async def scene(answers: ActiveResponses, connection: Connection, work: Work) -> None:
        running = asyncio.create_task(answers.run(work.run(), {}, connection.receive))
        await work.begun.wait()
        work.may_end.set()
        answers.cancel_all(shutting_down())
        assert await running == "done"

    play(scene)
