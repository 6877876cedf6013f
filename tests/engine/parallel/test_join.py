"""Joining of ranks: proofs of a secret, versions, changed frames; sockets that say nothing delay for a bounded time."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Thread
from types import SimpleNamespace

import pytest

from quire.core.errors import ConfigError
from quire.core.version import __version__
from quire.engine.options import EngineOptions
from quire.engine.parallel import join
from quire.engine.parallel.addresses import key_of
from quire.engine.parallel.channel import CODE_BYTES, FrameSeal
from quire.engine.parallel.join import (
    MAX_HANDSHAKES,
    MAX_PER_ADDRESS,
    MAX_WAITING,
    TURN_S,
    Joined,
    JoinPort,
    answer,
    greet,
    join_run,
)
from quire.engine.parallel.rank_messages import Join
from support.engine_process import TIMEOUT_S, wait_until

KEY, OTHER = key_of(b"one secret"), key_of(b"another secret")
Sockets = tuple[socket.socket, socket.socket]



class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Port:
    """A join port on loopback, and the sockets that have been opened to it."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing, self.clock = closing, Clock()
        self.listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        self.address = self.listener.getsockname()
        self.port = JoinPort(self.listener, KEY, self.clock)
        closing.callback(self.port.close)
        self._threads = closing.enter_context(ThreadPoolExecutor(4))

    def dial(self, source: str = "127.0.0.1") -> socket.socket:
        return self._closing.enter_context(socket.create_connection(self.address, TIMEOUT_S, (source, 0)))

    def flood(self, count: int, source: str = "127.0.0.1") -> None:
        for _ in range(count):
            self.dial(source)

    def answer(self, rank: int, key: bytes = KEY) -> "Future[object]":
        """Join as an honest rank does."""
        return self._threads.submit(answer, self.dial(), key, rank, TIMEOUT_S)

    def accept(self, count: int) -> None:
        for _ in range(count):
            self.port.poll()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(join, "HANDSHAKE_TIMEOUT_S", TIMEOUT_S)     # sockets that say nothing stay open meanwhile
    with ExitStack() as closing:
        yield Port(closing)


def joined_rank(port: Port) -> int:
    """Return the rank that joins, while no time passes."""
    wait_until(lambda: port.port.advance() or not port.port.joined.empty())
    joined = port.port.joined.get()
    assert isinstance(joined, Joined)
    joined.connection.close()
    return joined.rank


def test_rank_joins_beside_fewer_silent_sockets_than_the_bound(port: Port) -> None:
    port.flood(MAX_PER_ADDRESS - 1)
    answered = port.answer(3)
    port.accept(MAX_PER_ADDRESS)
    assert joined_rank(port) == 3
    answered.result()


def test_silent_sockets_of_another_address_are_not_noticed(port: Port) -> None:
    port.flood(200, "127.0.0.2")
    answered = port.answer(3)
    port.accept(201)
    assert joined_rank(port) == 3
    answered.result()


def test_rank_behind_many_silent_sockets_joins_after_as_many_turns_as_they_fill(port: Port) -> None:
    num_silent = 5 * MAX_PER_ADDRESS
    port.flood(num_silent)
    answered = port.answer(3)
    port.accept(num_silent + 1)
    assert port.port.num_open == num_silent + 1
    for turn in range(1, 6):
        assert port.port.joined.empty()
        port.clock.now_s += TURN_S
        port.port.advance()
        wait_until(lambda turn=turn: port.port.num_open <= num_silent + 1 - turn * MAX_PER_ADDRESS)
        port.port.advance()
    assert joined_rank(port) == 3
    answered.result()


def test_connections_are_bounded_in_sum(port: Port) -> None:
    for number in range(8):
        port.flood(60, f"127.0.0.{number + 2}")
    port.accept(480)
    assert port.port.num_open == MAX_HANDSHAKES + MAX_WAITING
    assert len(port.port._greeted) == MAX_HANDSHAKES


def test_wrong_secret_is_refused_by_name_and_ends_nothing(port: Port) -> None:
    answered = port.answer(3, OTHER)
    port.accept(1)
    with pytest.raises(ConfigError, match="node 0 refuses the secret"):
        answered.result()
    wait_until(lambda: port.port.num_open == 0)
    assert port.port.joined.empty()


def test_handshake_has_one_deadline_however_slowly_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 5.5])
    monkeypatch.setattr(join, "time", SimpleNamespace(monotonic=lambda: next(times)))
    ours, theirs = socket.socketpair()
    received: list[int] = []

    class Dripping:
        """A connection that gives a byte at a time."""

        def __getattr__(self, name: str) -> object:
            return getattr(ours, name)

        def recv(self, num_bytes: int) -> bytes:
            received.append(num_bytes)
            return b"x"

    with ours, theirs, pytest.raises(TimeoutError, match="the handshake took too long"):
        greet(Dripping(), KEY)  # type: ignore[arg-type]
    assert len(received) == 2


def test_node_tries_again_when_its_connection_is_closed() -> None:
    num_dropped = 3
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        found: list[int] = []

        def serve() -> None:
            for _ in range(num_dropped):
                listener.accept()[0].close()
            connection = closing.enter_context(listener.accept()[0])
            found.append(greet(connection, KEY)[0])

        serving = Thread(target=serve, daemon=True)
        serving.start()
        address, number = listener.getsockname()
        connection, _ = join_run(Join(EngineOptions(start_timeout=TIMEOUT_S), 5, address, number, KEY))
        closing.enter_context(connection)
        serving.join()
        assert found == [5]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_ranks_with_one_secret_know_each_other(sockets: Sockets) -> None:
    with ThreadPoolExecutor(1) as threads:
        greeted = threads.submit(greet, sockets[0], KEY)
        to_leader, from_leader = answer(sockets[1], KEY, 3, TIMEOUT_S)
        rank, (to_rank, from_rank) = greeted.result()
    assert rank == 3
    for content in (b"", b"first", b"second"):
        assert from_leader.open(to_rank.close(content)) == content
        assert from_rank.open(to_leader.close(content)) == content


def test_another_secret_is_refused_on_both_sides(sockets: Sockets) -> None:
    def refuse() -> None:
        with sockets[0], pytest.raises(ConnectionError, match="another secret"):
            greet(sockets[0], KEY)

    with ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(refuse)
        with pytest.raises(ConfigError, match="node 0 refuses the secret: node_secret_file must be the same"):
            answer(sockets[1], OTHER, 1, TIMEOUT_S)
        refusing.result()


def test_leader_without_the_secret_is_refused(sockets: Sockets) -> None:
    sockets[0].sendall(join.RANKS.greeting + join.VERSION + bytes(32) + bytes(CODE_BYTES))
    with pytest.raises(ConfigError, match="node 0 has another secret"):
        answer(sockets[1], KEY, 1, TIMEOUT_S)


def test_what_is_no_node_is_refused(sockets: Sockets) -> None:
    sockets[0].sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n" + bytes(100))
    with pytest.raises(ConfigError, match="what listens at master_addr and master_port is not node 0 of Quire"):
        answer(sockets[1], KEY, 1, TIMEOUT_S)


def test_another_version_is_named_on_both_sides(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "VERSION", b"9.9".ljust(32))
    claim = join.VERSION + (1).to_bytes(4, "big") + bytes(32)
    greeting = join.RANKS.greeting + __version__.encode().ljust(32) + bytes(32)
    sockets[0].sendall(greeting + join._code(KEY, b"leader", bytes(32) + claim))
    monkeypatch.setattr(join, "secrets", SimpleNamespace(token_bytes=bytes))
    with pytest.raises(ConfigError, match=rf"rank 1 runs Quire .*, rank 0 runs {__version__}"):
        answer(sockets[1], KEY, 1, TIMEOUT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(claim + join._code(KEY, b"rank", bytes(32) + claim))
        monkeypatch.setattr(join, "VERSION", __version__.encode().ljust(32))
        with pytest.raises(ConfigError, match=rf"rank 1 runs Quire 9\.9, rank 0 runs {__version__}"):
            greet(ours, KEY)


@pytest.mark.parametrize("place", [0, CODE_BYTES, -1], ids=["code", "first byte", "last byte"])
def test_frame_that_was_changed_is_refused(place: int) -> None:
    sealed = bytearray(FrameSeal(KEY).close(b"content"))
    sealed[place] ^= 1
    with pytest.raises(ConnectionError, match="a frame with a wrong code"):
        FrameSeal(KEY).open(bytes(sealed))


def test_frame_that_comes_again_or_too_late_is_refused() -> None:
    sender, reader = FrameSeal(KEY), FrameSeal(KEY)
    first, second = sender.close(b"first"), sender.close(b"second")
    assert reader.open(first) == b"first"
    with pytest.raises(ConnectionError):
        reader.open(first)
    with pytest.raises(ConnectionError):
        FrameSeal(KEY).open(second)
    for sealed in (b"", b"short"):
        with pytest.raises(ConnectionError):
            FrameSeal(KEY).open(sealed)
