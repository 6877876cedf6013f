"""Handshakes of ranks over TCP: proofs of a secret, versions, and frames that were changed on their way."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from quire.core.errors import ConfigError
from quire.core.version import __version__
from quire.engine.parallel import handshake
from quire.engine.parallel.addresses import key_of
from quire.engine.parallel.handshake import CODE_BYTES, FrameSeal, answer, greet

KEY, OTHER = key_of(b"one secret"), key_of(b"another secret")
Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_ranks_with_one_secret_know_each_other(sockets: Sockets) -> None:
    with ThreadPoolExecutor(1) as threads:
        greeted = threads.submit(greet, sockets[0], KEY)
        to_leader, from_leader = answer(sockets[1], KEY, 3)
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
            answer(sockets[1], OTHER, 1)
        refusing.result()


def test_leader_without_the_secret_is_refused(sockets: Sockets) -> None:
    sockets[0].sendall(handshake.GREETING + handshake.VERSION + bytes(32) + bytes(CODE_BYTES))
    with pytest.raises(ConfigError, match="node 0 has another secret"):
        answer(sockets[1], KEY, 1)


def test_what_is_no_node_is_refused(sockets: Sockets) -> None:
    sockets[0].sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n" + bytes(100))
    with pytest.raises(ConfigError, match="what listens at master_addr and master_port is not node 0 of Quire"):
        answer(sockets[1], KEY, 1)


def test_another_version_is_named_on_both_sides(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "VERSION", b"9.9".ljust(32))
    claim = handshake.VERSION + (1).to_bytes(4, "big") + bytes(32)
    greeting = handshake.GREETING + __version__.encode().ljust(32) + bytes(32)
    sockets[0].sendall(greeting + handshake._code(KEY, b"leader", bytes(32) + claim))
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_bytes=bytes))
    with pytest.raises(ConfigError, match=rf"rank 1 runs Quire .*, rank 0 runs {__version__}"):
        answer(sockets[1], KEY, 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(claim + handshake._code(KEY, b"rank", bytes(32) + claim))
        monkeypatch.setattr(handshake, "VERSION", __version__.encode().ljust(32))
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
