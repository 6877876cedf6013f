"""An engine that hangs while it starts is given up; one that takes long is not."""

import asyncio
import os
import signal
import subprocess
import sys
from itertools import chain, count, repeat

import pytest

from quire.engine.launcher import EngineProcess, start_module
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.engine.processes.liveness import POLLS_PER_TIMEOUT, activity_counters, raise_when_inactive
from support.engine_process import Recorder, is_running, wait_until

LIMIT_S = 40.0


class OverError(Exception):
    """The test has seen enough."""


def watched(signs: object, num_looks: int) -> list[float]:
    """Return the pauses of a watch that is ended after so many looks."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > num_looks:
            raise OverError

    looks = iter(signs)  # type: ignore[call-overload]
    asyncio.run(raise_when_inactive(lambda: next(looks), LIMIT_S, pause))
    return pauses


def test_process_without_signs_is_given_up_after_the_limit() -> None:
    with pytest.raises(EngineDeadError, match=r"no sign of life for 40 s while it started.*start_timeout"):
        watched(repeat((1, 2)), POLLS_PER_TIMEOUT)


def test_any_sign_begins_the_limit_anew() -> None:
    still = [(1, 2)] * POLLS_PER_TIMEOUT
    with pytest.raises(OverError):
        watched(chain(still, [(1, 3)] * POLLS_PER_TIMEOUT, [(2, 3)] * 10), 2 * POLLS_PER_TIMEOUT)


def test_process_that_goes_on_is_waited_for_without_end() -> None:
    with pytest.raises(OverError):
        watched(((number,) for number in count()), 10_000)


def test_nothing_is_concluded_where_the_system_tells_nothing() -> None:
    with pytest.raises(OverError):
        watched(repeat(()), 10_000)


def test_process_that_computes_gives_signs_and_one_that_is_gone_gives_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = activity_counters(process.pid)
        assert before
        wait_until(lambda: activity_counters(process.pid) != before)
    finally:
        process.kill()
        process.wait()
    assert activity_counters(process.pid) == ()


def test_engine_that_hangs_at_its_start_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.launcher.STOP_TIMEOUT_S", 0.1)

    async def run() -> None:
        child = EngineProcess(*start_module("quire.engine.processes.engine_process"))   # not told what to load
        os.kill(child.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await EngineClient.connect(child, EngineOptions(), Recorder(), start_timeout_s=0.2)
        assert not is_running(child.process.pid)

    asyncio.run(run())
