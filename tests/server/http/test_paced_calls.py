"""Paced calls: a few per iteration of the event loop, in order, and none later than it must be."""

import asyncio
from collections import Counter

import uvloop

from quire.server.http.protocol import MAX_PER_ITERATION, PacedCalls


class Iterations:
    """The number of the running iteration of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._count()

    def _count(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._count)


def test_calls_of_a_burst_are_made_in_order_a_few_per_iteration() -> None:
    async def run() -> None:
        paced, iterations, made = PacedCalls(), Iterations(), list[tuple[int, int]]()
        for number in range(10 * MAX_PER_ITERATION + 1):
            paced.add(lambda number=number: made.append((number, iterations.number)))
        assert len(paced) == 9 * MAX_PER_ITERATION + 1, "the current iteration makes its share at once"
        while paced:
            await asyncio.sleep(0)
        assert [number for number, _ in made] == list(range(10 * MAX_PER_ITERATION + 1))
        assert max(Counter(iteration for _, iteration in made).values()) == MAX_PER_ITERATION

    uvloop.run(run())


def test_calls_of_different_iterations_are_made_at_once() -> None:
    async def run() -> None:
        paced, made = PacedCalls(), list[int]()
        for number in range(5 * MAX_PER_ITERATION):
            paced.add(lambda number=number: made.append(number))
            assert made[-1] == number
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    uvloop.run(run())


def test_call_that_adds_another_keeps_the_order() -> None:
    async def run() -> None:
        paced, made = PacedCalls(), list[str]()

        def first() -> None:
            paced.add(lambda: made.append("added by the first"))
            made.append("first")

        paced.add(lambda: made.append("before"))
        paced.add(first)
        paced.add(lambda: made.append("last"))
        while len(made) < 4:
            await asyncio.sleep(0)
        assert made.index("added by the first") < made.index("last")

    uvloop.run(run())
