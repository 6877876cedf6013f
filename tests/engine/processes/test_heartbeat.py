"""Signs of life while the engine works."""

import threading
from collections.abc import Callable

import pytest

from quire.engine.processes import liveness
from quire.engine.processes.liveness import Heartbeat

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_S", 0.0)


def start(progress: Callable[[], int], beat: Callable[[], None]) -> Heartbeat:
    new = Heartbeat(progress, beat)
    new.start()
    return new


def test_work_that_gets_on_beats_and_rest_does_not() -> None:
    steps, has_beaten = iter(range(10**9)), threading.Event()
    working = start(lambda: next(steps), has_beaten.set)
    assert not has_beaten.is_set()
    working.resume()
    assert has_beaten.wait(LIMIT_S)
    working.pause()


def test_work_that_stands_still_is_silent() -> None:
    num_looks, num_beats, has_looked = 0, 0, threading.Event()

    def progress() -> int:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 100:
            has_looked.set()
        return 3

    def beat() -> None:
        nonlocal num_beats
        num_beats += 1

    working = start(progress, beat)
    working.resume()
    assert has_looked.wait(LIMIT_S)
    working.pause()
    assert num_beats == 0
