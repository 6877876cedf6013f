"""KVProducer: keys and values of prompts for other engines, over TCP: prefill apart from decoding (DistServe, 2024).

A consumer connects and proves the secret, as ranks do (`quire.engine.parallel.join`); each frame then carries a code of
its number and content, so nothing can be changed, inserted or repeated. Both ends send the identity of their keys and
values first. The consumer redeems a ticket, asks for runs of blocks, and ends the lease; the end of the connection ends
all of its leases. Threads of connections copy blocks out of the cache while steps run: blocks of a lease are complete,
and no step writes them.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from quire.cache.kv_tickets import KVTicket, Tickets
from quire.core.arrays import UINT8, empty
from quire.core.errors import ConfigError
from quire.core.kv_identity import KVIdentity
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.join import Joined, JoinKind, JoinPort

if TYPE_CHECKING:
    from quire.execution.kv_store import CacheBlocks

log = logging.getLogger(__name__)

PRODUCERS = JoinKind(
    b"quire-kv\n", "a producer", "the address in kv_peers", "kv_secret_file", "for producers and consumers",
    "the consumer", "the producer",
)  # fmt: skip
PURPOSE = b"quire kv"
MAX_COMMAND_BYTES = 1 << 16
SEND_TIMEOUT_S = 10         # for bytes that the other end does not read
MAX_CONNECTIONS = 64        # consumers
MAX_TICKET_CHARS = 64


class Identify(msgspec.Struct, tag="identify", array_like=True, frozen=True):
    """First message of both ends: what decides the bytes of its blocks."""

    identity: KVIdentity


class Redeem(msgspec.Struct, tag="redeem", array_like=True, frozen=True):
    """Redeem a ticket. `load` names the lease on this connection."""

    load: int
    ticket: str
    binding: bytes


class ReadBlocks(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """Send blocks [start, stop) of a lease, as a job."""

    load: int
    job: int
    start: int
    stop: int


class Release(msgspec.Struct, tag="release", array_like=True, frozen=True):
    """End a lease."""

    load: int


class Block(msgspec.Struct, tag="block", array_like=True, frozen=True):
    """A block of a job: its place in the prompt, its tokens of 4 bytes each, and its keys and values."""

    job: int
    index: int
    tokens: bytes
    payload: memoryview


class ReadEnded(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The end of a job. `reason`: why not all of its blocks were sent; empty: they were."""

    job: int
    reason: str = ""


decode_command = msgspec.msgpack.Decoder(Identify | Redeem | ReadBlocks | Release).decode


class KVProducer:
    """Listens for consumers until it is closed. `key`: of the secret. ConfigError if the address cannot be used."""

    def __init__(
        self, tickets: Tickets, blocks: "CacheBlocks", identity: KVIdentity, address: str, port: int, key: bytes
    ) -> None:
        self.tickets, self.identity, self.blocks = tickets, identity, blocks
        self.num_sent_blocks = 0
        self.on_change: Callable[[], None] = lambda: None  # called by any thread when a consumer comes or goes
        self._lock = threading.Lock()
        self._consumers = set[_Consumer]()
        self._is_closing = threading.Event()
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise ConfigError(f"kv_host {address} port {port} cannot be listened at: {error.strerror}") from error
        self._port = JoinPort(self._listener, key, kind=PRODUCERS)
        self._thread = threading.Thread(target=self._accept, name="kv-producer", daemon=True)
        self._thread.start()

    @property
    def num_consumers(self) -> int:
        """Consumers that are connected."""
        return len(self._consumers)

    @property
    def stats(self) -> dict[str, float]:
        """Counts of kept and sent blocks, for `KVStats.transfer`."""
        sent = self.num_sent_blocks * self.blocks.block_bytes
        found: dict[str, float] = {"held_blocks": self.tickets.num_blocks, "consumers": self.num_consumers}
        found["sent_bytes"] = sent
        return found | {f"tickets_{name}": count for name, count in dict(self.tickets.counts).items()}

    def count_sent(self) -> None:
        """Count a block that was sent."""
        with self._lock:
            self.num_sent_blocks += 1

    def close(self) -> None:
        """End all connections and leases. Idempotent."""
        self._is_closing.set()
        self._thread.join()
        self._port.close()
        self._listener.close()
        for consumer in list(self._consumers):
            consumer.close()
        self.tickets.clear()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                self._port.poll()
            except OSError as error:  # such as too many open files
                log.warning("a consumer of KV blocks cannot be accepted: %s", error)
                self._is_closing.wait(1.0)
            while not self._port.joined.empty():
                joined = self._port.joined.get()
                if isinstance(joined, ConfigError):
                    log.warning("a consumer of KV blocks is refused: %s", joined)
                elif len(self._consumers) >= MAX_CONNECTIONS or self._is_closing.is_set():
                    joined.connection.close()
                else:
                    self._serve(joined)

    def _serve(self, joined: Joined) -> None:
        consumer = _Consumer(self, joined)
        self._consumers.add(consumer)
        consumer.start()
        self.on_change()

    def remove(self, consumer: "_Consumer") -> None:
        """Forget a consumer, which has gone."""
        self._consumers.discard(consumer)
        self.on_change()


class _Consumer:
    """The connection of a consumer, and its leases."""

    def __init__(self, producer: KVProducer, joined: Joined) -> None:
        self._producer, self._place = producer, joined.place
        keep_alive(joined.connection)
        self._channel = Channel(joined.connection, decode_command, joined.seals, MAX_COMMAND_BYTES)
        self._leases: dict[int, KVTicket] = {}
        self._is_identified = False
        self._row = empty((producer.blocks.block_bytes,), UINT8)

    def start(self) -> None:
        """Send the identity, and begin to read."""
        with suppress(OSError):
            self._channel.send(Identify(self._producer.identity))
        self._channel.start(self._end, self._handles)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _end(self) -> None:
        self._channel.close()
        for ticket in self._leases.values():
            self._producer.tickets.end(ticket)
        self._producer.remove(self)

    def _handles(self, command: Identify | Redeem | ReadBlocks | Release) -> bool:
        """Follow a command, in the thread that reads. OSError and ValueError end the connection."""
        if isinstance(command, Identify):
            self._identify(command.identity)
        elif not self._is_identified:
            raise ValueError("a command before the identity")
        elif isinstance(command, Redeem):
            if command.load not in self._leases and len(command.ticket) <= MAX_TICKET_CHARS:
                ticket = self._producer.tickets.redeem(command.ticket, command.binding)
                if ticket is not None:
                    self._leases[command.load] = ticket
        elif isinstance(command, ReadBlocks):
            self._channel.send(ReadEnded(command.job, self._send_blocks(command)))
        else:
            ticket = self._leases.pop(command.load, None)
            if ticket is not None:
                self._producer.tickets.end(ticket)
        return True

    def _identify(self, identity: KVIdentity) -> None:
        difference = self._producer.identity.first_difference(identity)
        if difference is not None:
            log.warning("a consumer at %s has keys and values of another kind: %s", self._place, difference)
            raise ValueError(difference)
        self._is_identified = True

    def _send_blocks(self, command: ReadBlocks) -> str:
        """Send the blocks of a job; return why some were not sent, empty if all were."""
        ticket = self._leases.get(command.load)
        if ticket is None:
            return "refused"
        tickets, num_bytes = self._producer.tickets, len(ticket.tokens) // len(ticket.blocks)
        for index in range(max(0, command.start), command.stop):
            if index >= len(ticket.blocks):
                return "not_kept"
            with tickets.lock:  # the block is not the lease's any more once that is over
                if ticket.is_over:
                    return "gone"
                self._producer.blocks.copy_out(ticket.blocks[index], self._row)
            tokens = ticket.tokens[index * num_bytes : (index + 1) * num_bytes]
            self._channel.send(Block(command.job, index, tokens, self._row.data))
            self._producer.count_sent()
        return ""


def keep_alive(connection: socket.socket) -> None:
    """Bound the time of a connection to a machine that is gone, and of sending to a process that does not read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
