"""When a client takes an engine for stalled: counted in its own looks, so that its pauses are not the engine's."""

import asyncio
from collections.abc import Iterator

import pytest

from quire.engine.processes.liveness import LOOKS_PER_LIMIT, wait_for_stall


class Stopped(Exception):
    """No more looks."""


def watch(signs: Iterator[bool], awaited: Iterator[bool]) -> tuple[int, int]:
    """Return how many looks were taken before the stall, and how many signs were asked for. `Stopped` without one.

    `signs`: in each interval, whether a sign of progress has come; `awaited`: whether one is.
    """
    num_signs = num_looks = num_asked = 0
    is_awaited = False

    async def pause(seconds: float) -> None:
        nonlocal num_signs, num_looks, is_awaited
        assert seconds == 10.0 / LOOKS_PER_LIMIT
        sign, is_awaited = next(signs, None), next(awaited, False)
        if sign is None:
            raise Stopped
        num_signs += sign
        num_looks += 1

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1

    asyncio.run(wait_for_stall(10.0, lambda: num_signs, lambda: is_awaited, ask, pause))
    return num_looks, num_asked


def test_work_without_progress_is_a_stall_after_the_limit() -> None:
    assert watch(iter([False] * 100), iter([True] * 100)) == (LOOKS_PER_LIMIT + 1, 0)


def test_any_progress_begins_the_count_again() -> None:
    signs = [True, *[False] * LOOKS_PER_LIMIT, True, *[False] * 100]
    assert watch(iter(signs), iter([True] * 200)) == (2 * LOOKS_PER_LIMIT + 3, 0)


def test_engine_without_work_is_asked_once_per_limit_and_never_stalls() -> None:
    with pytest.raises(Stopped):
        watch(iter([False] * 35), iter([False] * 35))


def test_engine_that_does_not_answer_stalls() -> None:
    awaited = [*[False] * LOOKS_PER_LIMIT, *[True] * 100]
    assert watch(iter([False] * 200), iter(awaited)) == (2 * LOOKS_PER_LIMIT + 1, 1)
