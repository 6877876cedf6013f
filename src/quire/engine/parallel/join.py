"""Join port of node 0: connections that have not proven the secret yet are bounded in number, per address and in time.

Each handshake runs in a thread, within one deadline. Connections past the bounds wait in the order of their arrival;
while any waits, the oldest handshakes are closed once they have had TURN_S. So sockets that send nothing delay a rank
by a bounded time, however many an address opens again and again, and another address's hardly at all.
"""

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.engine.parallel.handshake import FrameSeal, greet

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
MAX_PER_ADDRESS = 32
MAX_WAITING = 256           # connections that were accepted and not greeted; further ones are closed
TURN_S = 1.0                # seconds of a handshake while others wait; an honest one takes milliseconds
POLL_S, BUSY_POLL_S = 0.25, 0.02
MAX_LOGGED = 10             # refused connections: others could fill the log


class Joined(NamedTuple):
    """A rank that has proven the secret."""

    rank: int
    connection: socket.socket
    seals: tuple[FrameSeal, FrameSeal]
    place: str


@dataclass(eq=False, slots=True)
class _Handshake:
    """A connection that was greeted. `is_over`: its end is decided; under the port's lock."""

    connection: socket.socket
    address: str
    begun_s: float
    is_over: bool = False


class JoinPort:
    """Accepts connections at a listener until it is closed. `joined` gets ranks, and errors that end the run."""

    def __init__(self, listener: socket.socket, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.joined = SimpleQueue[Joined | ConfigError]()
        self._listener, self._key, self._clock = listener, key, clock
        self._lock = threading.Lock()
        self._greeted: list[_Handshake] = []                # oldest first
        self._waiting = deque[tuple[socket.socket, str]]()
        self._num_refused = 0

    @property
    def num_open(self) -> int:
        """Connections that are in a handshake, or wait for one."""
        return len(self._greeted) + len(self._waiting)

    def poll(self) -> None:
        """Accept the next connection, if one comes soon, and let handshakes begin and end."""
        self._listener.settimeout(BUSY_POLL_S if self._waiting else POLL_S)
        with suppress(TimeoutError):
            connection, place = self._listener.accept()
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append((connection, place[0]))
            else:
                connection.close()
        self.advance()

    def advance(self) -> None:
        """Begin the handshakes that fit the bounds; close old ones for which others wait."""
        with self._lock:
            counts = Counter(each.address for each in self._greeted)
            left = deque[tuple[socket.socket, str]]()
            while self._waiting:
                connection, address = self._waiting.popleft()
                if len(self._greeted) >= MAX_HANDSHAKES or counts[address] >= MAX_PER_ADDRESS:
                    left.append((connection, address))
                    continue
                counts[address] += 1
                self._begin(_Handshake(connection, address, self._clock()))
            self._waiting = left
            self._end_old({address for _, address in left})

    def close(self) -> None:
        """Close all connections that have not joined. The listener is its owner's."""
        with self._lock:
            for connection, _ in self._waiting:
                connection.close()
            self._waiting.clear()
            for handshake in self._greeted:
                _end(handshake)

    def _begin(self, handshake: _Handshake) -> None:
        self._greeted.append(handshake)
        threading.Thread(target=self._greet, args=(handshake,), name="handshake", daemon=True).start()

    def _end_old(self, waiting: set[str]) -> None:
        """Close handshakes that have had their turn, if one of their address waits, or the bound on all is reached."""
        is_full, latest_s = len(self._greeted) >= MAX_HANDSHAKES, self._clock() - TURN_S
        for handshake in self._greeted:
            if handshake.begun_s <= latest_s and waiting and (is_full or handshake.address in waiting):
                _end(handshake)

    def _greet(self, handshake: _Handshake) -> None:
        connection, found = handshake.connection, None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rank, seals = greet(connection, self._key)
            found = Joined(rank, connection, seals, handshake.address)
        except ConfigError as error:
            self.joined.put(error)
        except OSError as error:
            self._log_refusal(handshake.address, error)
        with self._lock:
            self._greeted.remove(handshake)
            if found is None or handshake.is_over:
                connection.close()
                return
            handshake.is_over = True
        self.joined.put(found)

    def _log_refusal(self, address: str, error: OSError) -> None:
        self._num_refused += 1
        if self._num_refused <= MAX_LOGGED:
            more = "; further ones are not logged" if self._num_refused == MAX_LOGGED else ""
            log.warning("a connection from %s is no rank of this run: %s%s", address, error, more)


def _end(handshake: _Handshake) -> None:
    """Make the thread of a handshake end; it closes the connection."""
    handshake.is_over = True
    with suppress(OSError):
        handshake.connection.shutdown(socket.SHUT_RDWR)
