"""Time slices of long work: one per iteration of the event loop, in order, for all requests together."""

import asyncio
from collections.abc import Iterator
from typing import Any

from quire.server.limits.fair_semaphore import TimeSlices, run_at_once, run_sliced


def test_one_slice_in_each_turn_and_others_run_in_between() -> None:
    made: list[tuple[str, int]] = []
    turns_seen: list[int] = []

    async def run() -> None:
        slices, num_turns, is_over = TimeSlices(), 0, False

        async def count() -> None:
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        def work(name: str) -> Iterator[int]:
            for number in range(5):
                made.append((name, number))
                turns_seen.append(num_turns)
                yield number

        async def consume(name: str) -> list[int]:
            return [number async for number in slices.iterate(work(name))]

        counting = asyncio.create_task(count())
        assert await asyncio.gather(consume("a"), consume("b")) == [[*range(5)]] * 2
        is_over = True
        await counting

    asyncio.run(run())
    assert sorted(made) == [(name, number) for name in "ab" for number in range(5)]
    assert made[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)], "first come, first served"
    assert len(set(turns_seen)) == len(turns_seen), "no two in one turn"


def test_slices_have_iterations_of_the_loop_between_them() -> None:
    def slices() -> Any:  # noqa: ANN401 (a generator)
        for number in range(3):
            done.append(number)
            yield
        return "result"

    async def check() -> None:
        task = asyncio.create_task(run_sliced(slices()))
        for number in range(3):
            await asyncio.sleep(0)
            assert done == list(range(number + 1))
        assert await task == "result"

    done: list[int] = []
    asyncio.run(check())
    assert run_at_once(slices()) == "result"
