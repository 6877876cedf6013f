"""Publisher of one engine's KV events over ZMQ, in the process that reads its reports, with the messages of vLLM 0.33.

A subscriber (SUB) gets [topic, number, batch], a batch in msgpack, numbered from 0 in 8 bytes. Whoever missed batches
sends a number to the replay address (ROUTER), and gets those from there on that are still kept, then the number -1.

Publishing never waits. A thread owns the sockets; it is given batches through a queue within the process, and a batch
that finds the queue full is dropped and counted: subscribers see that its number is missing. The publisher outlives its
engine: when that dies, nothing of its cache is left, and subscribers are told so.

pyzmq is an optional package: this module is imported where events are on.
"""

import logging
import time
from collections import deque
from threading import Thread
from typing import Any

import msgspec
import zmq

from quire.core.errors import ConfigError
from quire.core.kv_events import DEFAULT_ENDPOINT, KVEventsConfig, address_of_engine, is_bound

log = logging.getLogger(__name__)

CLEARED = msgspec.msgpack.encode([{"type": "AllBlocksCleared"}])
AFTER_LAST = (-1).to_bytes(8, "big", signed=True)   # the number behind the last replayed batch
LINGER_MS = 500          # for what was published before the end
_NUM_REPLAY_FRAMES = 3   # a request: the sender's identity, nothing, a number


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float                    # seconds since 1970
    events: msgspec.Raw
    data_parallel_rank: int


Socket = zmq.Socket[bytes]
_encode = msgspec.msgpack.Encoder().encode


class KVEventPublisher:
    """The sockets of one engine, by its number. Its methods are for one thread at a time.

    ConfigError if an address is taken. `endpoint` and `replay_endpoint` are those of this engine, with the ports that
    the system has chosen; `num_published` and `num_dropped` count batches.
    """

    def __init__(self, config: KVEventsConfig, number: int) -> None:
        self.config, self._number = config, number
        self.num_published = self.num_dropped = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = LINGER_MS
        try:
            address = address_of_engine(config.endpoint or DEFAULT_ENDPOINT, number)
            published, self.endpoint = self._open_published(address)
            replays, self.replay_endpoint = self._open_replays(config.replay_endpoint)
            batches = self._context.socket(zmq.PULL)
            batches.set_hwm(1)
            batches.bind("inproc://batches")
            self._queue = self._context.socket(zmq.PUSH)
            self._queue.set_hwm(config.max_queue_size)
            self._queue.connect("inproc://batches")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        thread = _PublisherThread(config, batches, published, replays)
        self._thread = Thread(target=thread.run, name=f"kv events {number}", daemon=True)
        self._thread.start()

    def _open_published(self, address: str) -> tuple[Socket, str]:
        socket = self._context.socket(zmq.PUB)
        socket.set_hwm(self.config.hwm)
        if self.config.endpoint is None or is_bound(address):
            return socket, _bind(socket, address)
        socket.connect(address)
        log.info("KV events of engine %d are sent to %s", self._number, address)
        return socket, address

    def _open_replays(self, address: str | None) -> tuple[Socket | None, str | None]:
        if address is None:
            return None, None
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(2 * (self.config.buffer_steps + 1))   # as vLLM: a whole replay fits; what does not is dropped
        return socket, _bind(socket, address_of_engine(address, self._number))

    def publish(self, events: bytes) -> None:
        """Publish a msgpack array of events as the next batch; drop it if the queue is full."""
        number = self.num_published + self.num_dropped
        batch = _encode(_Batch(time.time(), msgspec.Raw(events), self._number))
        try:
            self._queue.send_multipart((number.to_bytes(8, "big"), batch), zmq.NOBLOCK)
            self.num_published += 1
        except zmq.Again:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning("a batch of KV events was dropped: %d wait (max_queue_size)", self.config.max_queue_size)

    def clear(self) -> None:
        """Tell that no block can be found: the engine has ended."""
        self.publish(CLEARED)

    def close(self) -> None:
        """Tell that no block can be found, and close the sockets, after up to a second. Idempotent."""
        if self._queue.closed:
            return
        self.clear()
        try:
            self._queue.send(b"", zmq.NOBLOCK)
            self._thread.join(LINGER_MS / 1000)
        except zmq.Again:
            pass                    # the queue is full: what is in it is lost
        self._queue.close()
        self._context.term()        # ends the thread's wait; it closes its sockets

    @property
    def num_batches(self) -> dict[str, int]:
        """Batches since start, by what has become of them."""
        return {"published": self.num_published, "dropped": self.num_dropped}

    @property
    def source(self) -> dict[str, Any]:
        """The settings in vLLM's names, with the addresses of this engine."""
        config = self.config
        return {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint, "buffer_steps": config.buffer_steps, "hwm": config.hwm,
            "max_queue_size": config.max_queue_size, "topic": config.topic,
        }  # fmt: skip


def _bind(socket: Socket, address: str) -> str:
    """Bind a socket; return its address, with the port that the system has chosen if it is 0."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config: {address}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT) if address.endswith(":0") else address


class _PublisherThread:
    """Sends batches to subscribers, keeps the latest, and sends them again to whoever asks."""

    def __init__(
        self, config: KVEventsConfig, batches: Socket, published: Socket,
        replays: Socket | None,
    ) -> None:  # fmt: skip
        self._config, self._topic = config, config.topic.encode()
        self._batches, self._published, self._replays = batches, published, replays
        self._kept, self._num_kept_bytes = deque[tuple[bytes, bytes]](), 0

    def run(self) -> None:
        """Serve until an empty message comes, or the sockets' context ends."""
        poller = zmq.Poller()
        for socket in (self._batches, self._replays):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._batches in ready:
                    batch = self._batches.recv_multipart()
                    if len(batch) == 1:
                        return
                    self._send(*batch)
                if self._replays is not None and self._replays in ready:
                    self._send_again(self._replays, self._replays.recv_multipart())
        except zmq.ContextTerminated:
            pass                    # closed before the thread had read all
        finally:
            for socket in (self._batches, self._published, self._replays):
                if socket is not None:
                    socket.close()

    def _send(self, number: bytes, batch: bytes) -> None:
        self._published.send_multipart((self._topic, number, batch))    # a subscriber that is behind loses it
        if self._replays is None:
            return
        self._kept.append((number, batch))
        self._num_kept_bytes += len(batch)
        while len(self._kept) > self._config.buffer_steps or self._num_kept_bytes > self._config.buffer_bytes:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _send_again(self, replays: Socket, request: list[bytes]) -> None:
        """Answer a request for replay; anything else is ignored."""
        if len(request) != _NUM_REPLAY_FRAMES or len(request[2]) != len(AFTER_LAST):
            return
        sender, _, first = request
        for number, batch in self._kept:
            if number >= first:         # both are big-endian
                replays.send_multipart((sender, b"", self._topic, number, batch))
        replays.send_multipart((sender, b"", b"", AFTER_LAST, b""))
