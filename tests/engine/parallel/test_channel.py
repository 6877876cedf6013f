"""Channels between ranks: messages, heartbeats, silence, and the end of the stream."""

import socket
from collections.abc import Iterator
from threading import Event, Timer

import pytest

from quire.core.frames import LENGTH_BYTES
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel
from support.engine_process import TIMEOUT_S, wait_until

Ends = tuple[Channel, Channel, Event]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Rank 0's channel, another rank's, and the event of that one's end."""
    ours, theirs = socket.socketpair()
    has_ended = Event()
    leader, rank = Channel(ours, rank_messages.decode_report), Channel(theirs, rank_messages.decode_command)
    leader.start()
    rank.start(has_ended.set, lambda command: command == rank_messages.Resume())
    yield leader, rank, has_ended
    leader.close()
    assert has_ended.wait(TIMEOUT_S)
    rank.close()


def test_messages_arrive_in_order_and_handled_ones_are_not_received(ends: Ends) -> None:
    leader, rank, _ = ends
    for plan in (b"first", b"second"):
        leader.send(rank_messages.Resume())
        leader.beat()
        leader.send(rank_messages.Step(plan))
    assert [rank.receive(), rank.receive()] == [rank_messages.Step(b"first"), rank_messages.Step(b"second")]
    rank.send(rank_messages.Stopped(None))
    assert leader.receive() == rank_messages.Stopped(None)


def test_end_of_the_stream_is_told_after_what_was_sent(ends: Ends) -> None:
    leader, rank, has_ended = ends
    leader.send(rank_messages.Step(b"last"))
    leader.close()
    leader.close()
    assert has_ended.wait(TIMEOUT_S)
    assert rank.receive() == rank_messages.Step(b"last")
    for _ in range(2):
        with pytest.raises(EOFError):
            rank.receive()
    leader.beat()  # nothing happens
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the system)
        leader.send(rank_messages.Resume())


def test_silence_is_counted_in_looks_and_ends_with_a_heartbeat(ends: Ends) -> None:
    """However long this process was stopped between two looks: what was sent meanwhile is not read yet."""
    leader, rank, _ = ends
    rank.silence_limit_s = 2 * BEAT_INTERVAL_S
    assert [rank.is_silent() for _ in range(5)] == [False, False, False, True, True]
    leader.beat()
    wait_until(lambda: not rank.is_silent())
    assert [rank.is_silent() for _ in range(3)] == [False, False, True]


def test_heartbeat_does_not_wait_for_a_reader() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours, rank_messages.decode_report)
        for _ in range(100_000):  # more than the sockets hold
            channel.beat()
        channel.close()
        with theirs.makefile("rb") as stream:
            sent = stream.read()
    assert 0 < len(sent) < 100_000 * LENGTH_BYTES
    assert sent == bytes(len(sent))
    assert len(sent) % LENGTH_BYTES == 0, "a heartbeat was cut"


def test_reason_of_an_end_waits_for_a_heartbeat_that_is_being_sent(ends: Ends) -> None:
    """A busy machine stops the thread that beats at any point: what ranks end with must arrive all the same."""
    leader, rank, _ = ends
    leader._sending.acquire()
    Timer(0.1, leader._sending.release).start()
    leader.offer(rank_messages.End("rank 0 was closed"), TIMEOUT_S)
    leader.close()
    assert rank.receive() == rank_messages.End("rank 0 was closed")


def test_reason_of_an_end_is_given_up_where_sending_does_not_end(ends: Ends) -> None:
    leader, rank, _ = ends
    with leader._sending:
        leader.offer(rank_messages.End("rank 0 was closed"), 0.01)
    leader.close()
    with pytest.raises(EOFError):
        rank.receive()


def test_frame_that_is_no_message_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    has_ended = Event()
    channel = Channel(ours, rank_messages.decode_report)
    channel.start(has_ended.set)
    theirs.sendall(b"\0\0\0\1\xff")
    assert has_ended.wait(TIMEOUT_S)
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
    theirs.close()
