"""Stop signals, SIGTERM and SIGINT: the first requests a drain, the second ends the process."""

import asyncio
import os
import signal
from typing import Any, NoReturn

from quire.engine.launcher import EngineProcess

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(SystemExit):
    """A stop signal before the event loop runs. The exit status is a shell's for that signal."""


def exit_on_signal(number: int, _frame: object) -> NoReturn:
    """Raise StoppedError (a handler for `signal.signal`)."""
    raise StoppedError(_status(number))


class StopSignals:
    """Signal handlers on the running event loop. A second signal kills the engines and ends the process."""

    def __init__(self, children: list[EngineProcess]) -> None:
        self.number: int | None = None
        self.children = children  # processes of the current engines
        self._event = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    @property
    def received(self) -> bool:
        """True if a first signal was received."""
        return self.number is not None

    @property
    def status(self) -> int:
        """The exit status of a server that was stopped before it was ready."""
        return _status(self.number or 0)

    async def wait_or(self, other: asyncio.Task[Any]) -> None:
        """Wait for the first signal or for the end of a task, which is not cancelled."""
        waiting = asyncio.create_task(self._event.wait())
        await asyncio.wait((waiting, other), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def replace_child(self, number: int, child: EngineProcess) -> None:
        """Record the process of an engine that replaces a dead one."""
        self.children[number] = child

    def kill_engines(self) -> None:
        """Kill the processes of all engines: they hold no state."""
        for child in self.children:
            child.process.kill()

    def _handle(self, number: int) -> None:
        if not self.received:
            self.number = number
            self._event.set()
            return
        self.kill_engines()
        os._exit(_status(number))


def _status(number: int) -> int:
    return 128 + number
