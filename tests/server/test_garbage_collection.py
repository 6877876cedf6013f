"""Garbage collection of a server: full collections are rare while requests are open, and made when none is."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from quire.server.lifecycle import collect_when_idle
from support.engine_process import until

BUSY = """
import gc
from quire.server.start import _collect_rarely
_collect_rarely()
before = gc.get_stats()[2]["collections"]
held = [[number] for number in range(1_000_000)]
print(gc.get_stats()[2]["collections"] - before, gc.get_stats()[1]["collections"] > 100)
"""


class Node:
    """An object that refers to itself, so that its reference count never frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_of_a_burst_cause_no_full_collection() -> None:
    result = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "True"]


@pytest.mark.usefixtures("tests_frozen")
def test_cycles_are_freed_when_no_request_is_open() -> None:
    async def run() -> None:
        num_open, node = 1, Node()
        found = weakref.ref(node)
        gc.collect(1)  # moves the node into the oldest generation
        del node
        task = asyncio.create_task(collect_when_idle(lambda: num_open, interval_s=0.001))
        await asyncio.sleep(0.01)
        assert found() is not None, "a request is open"
        num_open = 0
        await until(lambda: found() is None)
        task.cancel()

    asyncio.run(run())
