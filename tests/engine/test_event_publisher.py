"""The publisher of KV events over real sockets: messages, replays, bounds, and the end of an engine."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.core.errors import ConfigError
from quire.core.kv_events import KVEventsConfig
from quire.engine.event_publisher import CLEARED, KVEventPublisher

LIMIT_MS = 120_000
EVENTS = msgspec.msgpack.encode([{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}])
CLEARED_BATCH = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"  # vLLM 0.33.0's, of 1.5 s
Frames = list[bytes]


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """Return the subscribers' context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: "zmq.Context[zmq.Socket[bytes]]", address: str, topic: str = "") -> "zmq.Socket[bytes]":
    """Return a socket that is connected."""
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = LIMIT_MS
    socket.subscribe(topic)
    socket.connect(address)
    return socket


def read_until(socket: "zmq.Socket[bytes]", publisher: KVEventPublisher) -> int:
    """Publish until a subscriber, which joins late, gets a batch, and read what follows; return the last number."""
    publisher.publish(EVENTS)
    while not socket.poll(20):
        publisher.publish(EVENTS)
    while (number := int.from_bytes(socket.recv_multipart()[1], "big")) < publisher.num_published - 1:
        pass
    return number


def replay(context: "zmq.Context[zmq.Socket[bytes]]", address: str, first: int) -> list[Frames]:
    """Return what is kept from a number on, without the last message."""
    frames: list[Frames] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.rcvtimeo = LIMIT_MS
        dealer.connect(address)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while (answer := dealer.recv_multipart())[2] != b"\xff" * 8:
            assert answer[0] == b""
            frames.append(answer[1:])
    assert answer == [b"", b"", b"\xff" * 8, b""]
    return frames


def test_batches_are_numbered_and_what_was_missed_is_replayed(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    config = KVEventsConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@pod@model", buffer_steps=4)
    with closing(KVEventPublisher(config, 1)) as publisher:
        assert publisher.replay_endpoint is not None
        socket = subscribe(context, publisher.endpoint, "kv@")
        number = read_until(socket, publisher)
        publisher.publish(EVENTS)
        topic, _, batch = socket.recv_multipart()
        _, events, rank = msgspec.msgpack.decode(batch)
        assert (topic, rank, msgspec.msgpack.encode(events)) == (b"kv@pod@model", 1, EVENTS)
        while int.from_bytes(replay(context, publisher.replay_endpoint, 0)[-1][1], "big") < number + 1:
            pass
        missed = replay(context, publisher.replay_endpoint, number + 1)
        assert [int.from_bytes(frames[1], "big") for frames in missed] == [number + 1]
        assert missed[0] == [topic, (number + 1).to_bytes(8, "big"), batch]
        for _ in range(9):
            publisher.publish(EVENTS)
            socket.recv_multipart()
        assert len(replay(context, publisher.replay_endpoint, 0)) == 4, "buffer_steps"
    while True:
        _, _, batch = socket.recv_multipart()
        if msgspec.msgpack.decode(batch)[1] == [{"type": "AllBlocksCleared"}]:
            break
    socket.close(linger=0)


def test_batch_is_vllms_byte_for_byte() -> None:
    ts, events, rank = msgspec.msgpack.decode(bytes.fromhex(CLEARED_BATCH))
    assert (msgspec.msgpack.encode(events), ts, rank) == (CLEARED, 1.5, 0)


def test_full_queue_drops_and_counts_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: list[object] = []                                                  # threads that take nothing
    monkeypatch.setattr("quire.engine.event_publisher._PublisherThread.run", lambda self: idle.append(self))  # noqa: PLW0108 (a list's method would not be bound)
    publisher = KVEventPublisher(KVEventsConfig("tcp://127.0.0.1:0", max_queue_size=3), 0)
    for _ in range(20):
        publisher.publish(EVENTS)
    batches = publisher.num_batches
    assert batches["published"] + batches["dropped"] == 20
    assert 3 <= batches["published"] <= 5
    publisher._context.destroy(linger=0)


def test_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with closing(KVEventPublisher(KVEventsConfig("tcp://127.0.0.1:0"), 0)) as first:
        port = int(first.endpoint.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"kv_events_config: tcp://127.0.0.1:{port}: Address already in use"):
            KVEventPublisher(KVEventsConfig(f"ipc://{tmp_path}/kv", f"tcp://127.0.0.1:{port}"), 0)
