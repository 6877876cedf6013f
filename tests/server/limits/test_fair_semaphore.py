"""Turns go round between clients, whatever the number of their jobs."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.server.limits.fair_semaphore import FairSemaphore, Lanes


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def num_waiting(semaphore: FairSemaphore) -> int:
    return sum(map(len, semaphore._waiting.values()))


async def started(semaphore: FairSemaphore, client_id: str, order: list[str]) -> asyncio.Task[None]:
    async def job() -> None:
        async with semaphore.slot(client_id):
            order.append(client_id)
            await asyncio.sleep(0)

    task = asyncio.create_task(job())
    await asyncio.sleep(0)
    return task


def test_clients_take_turns_however_many_jobs_they_have() -> None:
    async def check() -> None:
        semaphore, order = FairSemaphore(), list[str]()
        async with semaphore.slot("held"):
            tasks = [await started(semaphore, client, order) for client in ["a"] * 5 + ["b"] * 2 + ["c"]]
            assert num_waiting(semaphore) == 8
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c", "a", "b", "a", "a", "a"]
        assert (num_waiting(semaphore), semaphore.is_full) == (0, False)

    run(check())


def test_a_place_is_held_by_one_job() -> None:
    async def check() -> None:
        semaphore, num_inside = FairSemaphore(2), 0

        async def job() -> None:
            nonlocal num_inside
            async with semaphore.slot("a"):
                num_inside += 1
                assert num_inside <= 2
                await asyncio.sleep(0)
                num_inside -= 1

        await asyncio.gather(*(job() for _ in range(20)))

    run(check())


@pytest.mark.parametrize("is_granted", [False, True])
def test_a_job_that_is_cancelled_gives_its_place_to_the_next(is_granted: bool) -> None:
    async def check() -> None:
        semaphore, order = FairSemaphore(), list[str]()
        async with semaphore.slot("held"):
            first, second = await started(semaphore, "a", order), await started(semaphore, "b", order)
            if not is_granted:
                first.cancel()
                await asyncio.sleep(0)
                assert num_waiting(semaphore) == 1
        first.cancel()  # granted by now, and not resumed yet
        await second
        assert order == ["b"]
        assert first.cancelled()
        assert (num_waiting(semaphore), semaphore.is_full) == (0, False)

    run(check())


def test_short_jobs_do_not_wait_for_long_ones() -> None:
    async def check() -> None:
        lanes = Lanes()
        async with lanes.slot("a", is_long=True), lanes.slot("a", is_long=False):
            assert lanes.long.is_full

    run(check())
