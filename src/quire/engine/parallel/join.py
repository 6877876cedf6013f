"""Joining over TCP: the port at which one end accepts the others, and the handshake of both.

Ranks of tensor parallelism join node 0, and engines join another one that has keys and values for them.

Both prove that they have the run's key without sending it: each answers the other's random number with a code
(HMAC-SHA-256, RFC 2104) of both numbers. Each frame then carries a code of its number in its direction and its content,
by keys of this connection alone: nothing can be changed, inserted, repeated or left out. Nothing is encrypted.

Connections that have not proven the secret yet are bounded in number, per address and in time. Each handshake runs in a
thread, within one deadline. Connections past the bounds wait in the order of their arrival; while any waits, the oldest
handshakes are closed once they have had TURN_S. So sockets that send nothing delay a rank by a bounded time, however
many an address opens again and again, and another address's hardly at all. Loads no torch.
"""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from quire.core.errors import ConfigError, EngineError
from quire.core.version import __version__
from quire.engine.parallel.channel import CODE_BYTES, FrameSeal
from quire.engine.parallel.rank_messages import Join

log = logging.getLogger(__name__)

VERSION = __version__.encode().ljust(32)[:32]
NUMBER_BYTES = 32
RANK_BYTES = 4
HANDSHAKE_TIMEOUT_S = 5.0   # for all of it
REFUSAL = b"refused".ljust(CODE_BYTES)  # replaces rank 0's proof: the rank's own is wrong
MAX_HANDSHAKES = 64
MAX_PER_ADDRESS = 32
MAX_WAITING = 256           # connections that were accepted and not greeted; further ones are closed
TURN_S = 1.0                # seconds of a handshake while others wait; an honest one takes milliseconds
POLL_S, BUSY_POLL_S = 0.25, 0.02
MAX_LOGGED = 10             # refused connections: others could fill the log
CONNECT_SHARE = 0.8         # part of the start timeout within which node 0 must listen
CONNECT_PAUSE_S = 0.2


class JoinKind(NamedTuple):
    """Names of the two sides, in the greeting and in errors."""

    greeting: bytes
    host: str       # the end that accepts
    place: str      # settings that say where it is
    secret: str     # what the secret is called
    nodes: str      # all ends, which need the same
    member: str     # the end that joins, with a place for its rank
    head: str       # the end that accepts, beside it


RANKS = JoinKind(
    b"quire-nodes\n", "node 0", "master_addr and master_port", "node_secret_file", "on all nodes", "rank {}", "rank 0"
)


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

    def __init__(
        self, listener: socket.socket, key: bytes, clock: Callable[[], float] = time.monotonic, kind: JoinKind = RANKS
    ) -> None:
        self.joined = SimpleQueue[Joined | ConfigError]()
        self._listener, self._key, self._clock, self._kind = listener, key, clock, kind
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
            rank, seals = greet(connection, self._key, self._kind)
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
            log.warning("a connection from %s to %s is refused: %s%s", address, self._kind.host, error, more)


def _end(handshake: _Handshake) -> None:
    """Make the thread of a handshake end; it closes the connection."""
    handshake.is_over = True
    with suppress(OSError):
        handshake.connection.shutdown(socket.SHUT_RDWR)


def join_run(join: Join) -> tuple[socket.socket, tuple[FrameSeal, FrameSeal]]:
    """Return a connection to rank 0 that has proven the secret, and its seals. Tries until the time is over.

    EngineError if rank 0 does not listen for long, or closes every connection. ConfigError as in `answer`.
    """
    limit_s = CONNECT_SHARE * join.options.start_timeout
    deadline_s = time.monotonic() + limit_s
    while True:
        connection = None
        failed = "did not listen"
        try:
            connection = socket.create_connection((join.address, join.port), timeout=CONNECT_PAUSE_S * 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failed = "did not let this rank join"
            return connection, answer(connection, join.key, join.rank, max(1.0, deadline_s - time.monotonic()))
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"node 0 {failed} at {join.address} port {join.port} within {limit_s:g} s "
                    f"(master_addr, master_port, start_timeout): {error}"
                ) from error
            time.sleep(CONNECT_PAUSE_S)


def greet(
    connection: socket.socket, key: bytes, kind: JoinKind = RANKS
) -> tuple[int, tuple[FrameSeal, FrameSeal]]:
    """Let the other end prove its key, as rank 0; return its rank, and the seals of what is sent and read.

    OSError if it has no proof within HANDSHAKE_TIMEOUT_S, ConfigError if it has one and runs another version.
    """
    number = secrets.token_bytes(NUMBER_BYTES)
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.sendall(kind.greeting + VERSION + number)
    claim = _read(connection, len(VERSION) + RANK_BYTES + NUMBER_BYTES, deadline_s)
    both = number + claim
    if not hmac.compare_digest(_read(connection, CODE_BYTES, deadline_s), _code(key, b"rank", both)):
        connection.sendall(REFUSAL)
        raise ConnectionError("another secret")
    connection.sendall(_code(key, b"leader", both))
    connection.settimeout(None)
    version, rank = claim[: len(VERSION)], int.from_bytes(claim[len(VERSION) :][:RANK_BYTES], "big")
    if version != VERSION:
        raise ConfigError(f"{kind.member.format(rank)} runs Quire {_text(version)}, {kind.head} runs {__version__}")
    return rank, (FrameSeal(_code(key, b"to rank", both)), FrameSeal(_code(key, b"to leader", both)))


def answer(
    connection: socket.socket, key: bytes, rank: int, limit_s: float = HANDSHAKE_TIMEOUT_S, kind: JoinKind = RANKS
) -> tuple[FrameSeal, FrameSeal]:
    """Prove the key to rank 0, and let it do so; return the seals of what is sent and read.

    OSError if the connection ends, or `limit_s` seconds are over: rank 0 may have closed it for others that wait.
    ConfigError for another secret or version, or what is no rank 0.
    """
    deadline_s = time.monotonic() + limit_s
    greeting = _read(connection, len(kind.greeting) + len(VERSION) + NUMBER_BYTES, deadline_s)
    if not greeting.startswith(kind.greeting):
        raise ConfigError(f"what listens at {kind.place} is not {kind.host} of Quire")
    version, number = greeting[len(kind.greeting) : -NUMBER_BYTES], greeting[-NUMBER_BYTES:]
    claim = VERSION + rank.to_bytes(RANK_BYTES, "big") + secrets.token_bytes(NUMBER_BYTES)
    both = number + claim
    connection.sendall(claim + _code(key, b"rank", both))
    proof = _read(connection, CODE_BYTES, deadline_s)
    if proof == REFUSAL:
        raise ConfigError(f"{kind.host} refuses the secret: {kind.secret} must be the same {kind.nodes}")
    if not hmac.compare_digest(proof, _code(key, b"leader", both)):
        raise ConfigError(f"{kind.host} has another secret: {kind.secret} must be the same {kind.nodes}")
    connection.settimeout(None)
    if version != VERSION:
        raise ConfigError(f"{kind.member.format(rank)} runs Quire {__version__}, {kind.head} runs {_text(version)}")
    return FrameSeal(_code(key, b"to leader", both)), FrameSeal(_code(key, b"to rank", both))


def _text(version: bytes) -> str:
    return version.decode(errors="replace").strip()


def _code(key: bytes, purpose: bytes, numbers: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + numbers, "sha256")


def _read(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Read so many bytes. ConnectionError if the stream ends before, TimeoutError at the deadline."""
    found = bytearray()
    while len(found) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the connection has ended in the handshake")
        found += part
    return bytes(found)
