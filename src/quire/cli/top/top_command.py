"""`quire top`: what a server does, once or twice a second, until a key ends it."""

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec
from rich.console import Console
from rich.live import Live

from quire.cli.flag_groups import flag
from quire.cli.top.display import KEYS, SORTS, screen, text_of
from quire.cli.top.reading import Reading, Snapshot, UnreadableServerError, has_restarted, read, snapshot
from quire.core.errors import ConfigError

WINDOW_S = 10.0  # rates and quantiles are of so long, as soon as there are readings
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
PIPE_WIDTH = 100  # columns where there is no terminal


def top(
    url: Annotated[str, flag("a server of Quire or vLLM, as http://HOST:PORT")] = "http://127.0.0.1:8000",
    interval: Annotated[float, flag("seconds between two readings", "--interval", "-i")] = 1.0,
    once: Annotated[bool, flag("print one screen, of two readings, and end", "--once")] = False,
    as_json: Annotated[bool, flag("print lines of JSON in place of screens", "--json")] = False,
    api_key: Annotated[str | None, flag("for the server; QUIRE_API_KEY in the environment")] = None,
) -> None:
    """Show what a server does: tokens and requests per second, waiting times, the KV cache, its engines.

    Everything is of its /metrics page.
    """
    if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
        raise ConfigError(f"interval must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:g} seconds, got {interval}")
    watch = Watch(url, api_key)
    watch.update()
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        while True:
            time.sleep(interval)
            watch.update()
            shown = watch.snapshot()
            print(msgspec.json.encode(shown).decode() if as_json else text_of(shown, _width()), flush=True)  # noqa: T201
            if once:
                return
    with _keys():
        _run(watch, interval)


class Watch:
    """The readings of a server within the last WINDOW_S seconds."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url, self._api_key = url, api_key
        self._readings = deque[Reading]()

    def update(self) -> None:
        """Read the server once more. UnreadableServerError as `read`; what was read before is kept."""
        reading = read(self.url, self._api_key)
        if self._readings and has_restarted(self._readings[-1], reading):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.time_s - self._readings[1].time_s >= WINDOW_S:
            self._readings.popleft()

    def snapshot(self) -> Snapshot:
        """Return what the server did within the window."""
        return snapshot(self.url, self._readings[0] if len(self._readings) > 1 else None, self._readings[-1])


@dataclass(slots=True)
class Controls:
    """State of the view that keys change."""

    is_paused: bool = False
    sort: int = 0  # index in SORTS
    engine: int | None = None  # place in the snapshot's engines; None: all
    is_over: bool = False

    def press(self, key: str, num_engines: int) -> None:
        """Take a key; those without a meaning change nothing."""
        match key:
            case "q" | "\x04":
                self.is_over = True
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "s":
                self.sort = (self.sort + 1) % len(SORTS)
            case "e":
                following = 0 if self.engine is None else self.engine + 1
                self.engine = following if following < num_engines else None


def _run(watch: Watch, interval: float) -> None:
    console, controls = Console(highlight=False), Controls()
    shown, fault = watch.snapshot(), ""
    next_s = time.monotonic() + interval
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not controls.is_over:
            at = controls.engine
            engine = None if at is None or at >= len(shown.engines) else shown.engines[at].engine
            note = fault or ("paused   " if controls.is_paused else "") + KEYS
            live.update(screen(shown, console.width, engine=engine, sort=SORTS[controls.sort], note=note), refresh=True)
            if select.select([sys.stdin], [], [], max(0.0, next_s - time.monotonic()))[0]:
                for key in os.read(sys.stdin.fileno(), 64).decode(errors="ignore") or "q":  # the terminal is gone
                    controls.press(key, len(shown.engines))
                continue
            next_s = time.monotonic() + interval
            try:
                watch.update()
                fault = ""
            except UnreadableServerError as error:
                fault = f"no reading: {error}"
            if not controls.is_paused:
                shown = watch.snapshot()


@contextmanager
def _keys() -> Iterator[None]:
    """Get each key as it is pressed, without showing it."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _width() -> int:
    return Console().width if sys.stdout.isatty() else PIPE_WIDTH
