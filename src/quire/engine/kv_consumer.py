"""KVConsumer: the blocks that other engines have computed, fetched for requests that wait (`quire.cache.loads`).

A peer is named and placed by the operator's file alone. There is one connection to each, made again when it ends. A
block is taken if it is the next one of its read, of the right size, and of the request's own tokens; what is fetched is
copied into the cache between two steps, as what is read from a disk is. A peer that ends, that refuses a ticket, or
that is late costs the blocks that have not arrived: the request computes them.
"""

import itertools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from quire.cache.kv_tickets import binding
from quire.cache.loads import KVLoad, Loads, Wanted
from quire.cache.prefix_tree import PrefixMatch, as_bytes
from quire.core.arrays import UINT8, Array, empty
from quire.core.errors import ConfigError, InvalidRequestError
from quire.core.kv_identity import FETCH_FAILURES, KVIdentity
from quire.core.sequence import KVTransfer
from quire.engine.kv_producer import (
    PRODUCERS,
    Block,
    Identify,
    KVProducer,
    ReadBlocks,
    ReadEnded,
    Redeem,
    Release,
    keep_alive,
)
from quire.engine.kv_reads import READ_LIMIT_S, BlockReads
from quire.engine.options.parallel_options import MAX_PEERS, is_peer_name
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.join import answer

if TYPE_CHECKING:
    from quire.execution.kv_store import CacheBlocks

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 0.25              # between two tries to connect; doubled up to ...
MAX_PAUSE_S = 10.0
STAGING_BYTES = 32 << 20    # blocks that have arrived, and are not in the cache yet
FRAME_BYTES = 1 << 16       # what a frame has beside its block
MAX_PEER_FILE_BYTES = 1 << 16

decode_report = msgspec.msgpack.Decoder(Identify | Block | ReadEnded).decode


class Place(NamedTuple):
    """Address that a producer listens at."""

    name: str
    host: str
    port: int


def read_peers(path: str) -> list[Place]:
    """Return the producers in a file. ConfigError names the line that is wrong."""
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(MAX_PEER_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kv_peers {path} cannot be read: {error}") from error
    if len(text) > MAX_PEER_FILE_BYTES:
        raise ConfigError(f"kv_peers {path} has more than {MAX_PEER_FILE_BYTES} bytes")
    places: dict[str, Place] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, port = words[-1].rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if len(words) != 2 or not is_peer_name(words[0]) or not host or not is_port:
            raise ConfigError(f"kv_peers {path}, line {number}: expected NAME HOST:PORT, got {line.strip()[:200]!r}")
        if words[0] in places:
            raise ConfigError(f"kv_peers {path}, line {number}: {words[0]} is there already")
        places[words[0]] = Place(words[0], host.strip("[]"), int(port))
    if not 1 <= len(places) <= MAX_PEERS:
        raise ConfigError(f"kv_peers {path} must have 1 to {MAX_PEERS} producers, got {len(places)}")
    return list(places.values())


@dataclass(slots=True, eq=False)
class PeerLoad(KVLoad):
    """A load of blocks from another engine. `number` names it on the connection."""

    source: "KVConsumer"
    peer: "_Peer"
    connection: Channel
    number: int
    transfer: KVTransfer
    binding: bytes
    tokens: bytes

    def same(self) -> None:
        """Return None: each request has a ticket of its own."""

    def begin(self) -> None:
        """Redeem the ticket."""
        with suppress(OSError):  # the reads end with the connection
            self.connection.send(Redeem(self.number, self.transfer.ticket, self.binding))

    def record_read(self, start: int, stop: int, num_whole: int, *, is_used: bool) -> None:
        """Count the blocks of a read."""
        self.source.num_blocks += num_whole if is_used else 0

    def release(self) -> None:
        """End the producer's lease."""
        with suppress(OSError):  # it has ended with the connection
            self.connection.send(Release(self.number))


class EndedFetch(NamedTuple):
    """A read that has ended: as `quire.engine.kv_reads.EndedRead`."""

    job: int
    num_whole: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks [start, start + len(places)) of a load, on their way into places of the staging memory."""

    job: int
    load: PeerLoad
    start: int
    places: list[int]
    num_whole: int = 0
    is_bad: bool = False
    has_ended: bool = False


class _Arrivals:
    """Fetches and the memory for their blocks, which threads of connections fill, and the engine's thread empties."""

    def __init__(self, block_bytes: int, block_size: int) -> None:
        self._block_bytes, self._token_bytes = block_bytes, 4 * block_size
        num_places = max(1, STAGING_BYTES // block_bytes)
        self.rows, self.free = empty((num_places, block_bytes), UINT8), list(range(num_places))
        self._lock = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}
        self._ended: list[EndedFetch] = []
        self._is_any = threading.Event()
        self.failures = Counter[str]()         # loads that were not made, or not finished, by reason

    # --- the engine's thread --------------------------------------------------------------------------------------

    def add(self, job: int, load: PeerLoad, start: int, stop: int) -> bool:
        """Take memory for blocks [start, stop) of a load; False: there is none."""
        with self._lock:
            if len(self.free) < stop - start:
                return False
            self._fetches[job] = _Fetch(job, load, start, [self.free.pop() for _ in range(start, stop)])
        return True

    def rows_of(self, job: int) -> list[Array]:
        """Return the memory of a read that has ended, block by block."""
        return [self.rows[place] for place in self._fetches[job].places]

    def drop(self, job: int) -> None:
        """Release the memory of a read that has ended."""
        with self._lock:
            self.free += self._fetches.pop(job).places

    def take_ended(self) -> list[EndedFetch]:
        """Return, once, the reads that have ended."""
        with self._lock:
            self._is_any.clear()
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended."""
        self._is_any.wait(timeout_s)

    def oldest(self) -> Channel | None:
        """Return the connection of the oldest read that has not ended."""
        with self._lock:
            return next((each.load.connection for each in self._fetches.values() if not each.has_ended), None)

    # --- threads of connections -----------------------------------------------------------------------------------

    def take(self, connection: Channel, report: Block | ReadEnded) -> None:
        """Take what a peer has sent. ValueError for what was not asked for: it ends the connection."""
        with self._lock:
            asked = (each for each in self._fetches.values() if each.load.connection is connection)
            fetch = next((each for each in asked if not each.has_ended), None)
        if fetch is None or fetch.job != report.job:  # reads end in the order in which they were begun
            raise ValueError(f"job {report.job} is not the next of this connection")
        if isinstance(report, ReadEnded):
            if report.reason and not fetch.is_bad:
                log.info("peer %s does not send all blocks: %.100s", fetch.load.peer.place.name, report.reason)
            self._end(fetch, report.reason if report.reason in FETCH_FAILURES else "refused")
            return
        index = report.index
        if (
            index != fetch.start + fetch.num_whole or fetch.num_whole == len(fetch.places)
            or len(report.payload) != self._block_bytes or len(report.tokens) != self._token_bytes
        ):  # fmt: skip
            raise ValueError(f"block {index} of {len(report.payload)} bytes was not asked for")
        if fetch.is_bad:
            return
        if report.tokens != fetch.load.tokens[index * self._token_bytes : (index + 1) * self._token_bytes]:
            fetch.is_bad = True
            return
        self.rows[fetch.places[fetch.num_whole]] = np.frombuffer(report.payload, np.uint8)
        fetch.num_whole += 1

    def end_all(self, connection: Channel) -> None:
        """End the reads of a connection that has ended, in their order."""
        with self._lock:
            fetches = [each for each in self._fetches.values() if each.load.connection is connection]
        for fetch in fetches:
            self._end(fetch, "disconnected")

    def _end(self, fetch: _Fetch, reason: str) -> None:
        """End a read. `reason`: why some of its blocks are missing."""
        with self._lock:
            if fetch.has_ended:
                return
            fetch.has_ended = True
            if fetch.num_whole < len(fetch.places):
                self.failures["other_tokens" if fetch.is_bad else reason] += 1
            self._ended.append(EndedFetch(fetch.job, fetch.num_whole, fetch.num_whole * self._block_bytes))
            self._is_any.set()


class KVConsumer:
    """All peers of an engine, and the reads of their blocks. `clock` returns seconds."""

    def __init__(
        self, loads: Loads, blocks: "CacheBlocks", block_size: int, identity: KVIdentity, peers: Sequence[Place],
        key: bytes, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.identity, self._blocks, self._block_size = identity, blocks, block_size
        self._names = loads.stored_keys.names
        self._reads = BlockReads[PeerLoad](loads, self, self._begin_read, self, clock)
        self._numbers = itertools.count(1)
        self.arrivals = _Arrivals(blocks.block_bytes, block_size)
        self.on_change: Callable[[], None] = lambda: None  # called by any thread when a peer comes or goes
        self.num_blocks = 0                                # fetched
        self.num_queried_tokens = self.num_hit_tokens = 0  # asked for, and found by requests
        self._peers = {place.name: _Peer(self, place, key) for place in peers}

    @property
    def most_frame_bytes(self) -> int:
        """Most bytes of a frame of a peer."""
        return self._blocks.block_bytes + 4 * self._block_size + FRAME_BYTES

    # --- a source of loads ----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Return True: what a peer does is known when one is asked for."""
        return True

    def check(self, transfer: KVTransfer) -> None:
        """Raise InvalidRequestError for a peer that is unknown, or has keys and values of another kind."""
        peer = self._peers.get(transfer.peer)
        problem = f"{transfer.peer!r} is no engine of kv_peers" if peer is None else peer.mismatch
        if problem is not None:
            raise InvalidRequestError(
                f"kv_transfer_params: {problem}", param="kv_transfer_params", code="kv_transfer_unavailable"
            )

    def find(self, wanted: Wanted, num_found: int) -> PeerLoad | None:
        """Return a load of the full blocks behind the first `num_found`, and of the state behind them if there is one.

        None where the peer is not connected.
        """
        transfer, state = wanted.transfer, self._blocks.parts
        num_full = (wanted.num_tokens - (state.num_parts > 0)) // self._block_size  # as `Tickets.keep` keeps them
        assert transfer is not None, "a load without a ticket"
        peer = self._peers[transfer.peer]
        connection = peer.connection
        if connection is None:
            return None
        names = self._names(as_bytes(wanted.token_ids[: num_full * self._block_size]))
        tokens = names + state.tokens(self._block_size)
        return PeerLoad(
            self, wanted.request_id, num_found, num_full + state.num_parts, num_found, num_found, peer=peer,
            connection=connection, number=next(self._numbers), transfer=transfer,
            binding=binding(transfer, wanted.scope), tokens=tokens, state=state,
        )  # fmt: skip

    def is_worth(self, wanted: Wanted, match: PrefixMatch, load: KVLoad | None) -> bool:
        """Return whether a load can be made, and count it: that it is worth it is the router's decision."""
        self.num_queried_tokens += wanted.num_tokens - match.num_tokens
        if load is None:
            self.arrivals.failures["unconnected"] += 1
        return load is not None

    def record_hit(self, num_tokens: int) -> None:
        """Count tokens that were fetched, of a request that is admitted with them."""
        self.num_hit_tokens += num_tokens

    def record_cancelled(self) -> None:
        """Count a load that was given up."""
        self.arrivals.failures["given_up"] += 1

    # --- between two steps ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Copy what has arrived into the cache, and ask for more."""
        for ended in self.arrivals.take_ended() if len(self._reads) else ():
            self._reads.end(ended)
        if self._reads.are_late():
            connection = self.arrivals.oldest()
            if connection is not None:
                log.warning("a peer takes more than %g s for KV blocks; its connection is closed", READ_LIMIT_S)
                connection.close()
        self._reads.begin()

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended."""
        self.arrivals.wait(timeout_s)

    def close(self) -> None:
        """End all connections. Idempotent."""
        for peer in self._peers.values():
            peer.close()

    @property
    def num_left(self) -> int:
        """Number of operations left for an idle engine: reads that will end."""
        return len(self._reads)

    @property
    def states(self) -> dict[str, int]:
        """Peers by state."""
        states = Counter({"connected": 0, "unconnected": 0, "incompatible": 0})
        states.update(peer.state for peer in self._peers.values())
        return dict(states)

    @property
    def stats(self) -> dict[str, float]:
        """Counts of fetched blocks, for `KVStats.transfer`."""
        found: dict[str, float] = {"received_bytes": self._reads.num_bytes, "receive_s": self._reads.seconds}
        found |= {"queries_tokens": self.num_queried_tokens, "hits_tokens": self.num_hit_tokens}
        found |= {f"peers_{name}": count for name, count in self.states.items()}
        return found | {f"failed_{name}": count for name, count in dict(self.arrivals.failures).items()}

    # --- memory of reads ------------------------------------------------------------------------------------------

    def _begin_read(self, job: int, load: PeerLoad, start: int, stop: int) -> bool:
        """Ask for blocks; False: there is no memory for them now."""
        if not self.arrivals.add(job, load, start, stop):
            return False
        with suppress(OSError):  # it has ended
            load.connection.send(ReadBlocks(load.number, job, start, stop))
        if load.peer.connection is not load.connection:  # it may have ended before the fetch was there
            self.arrivals.end_all(load.connection)
        return True

    def take_into(self, job: int, destinations: Sequence[int]) -> None:
        """Copy the first blocks of a read that has ended into blocks of the cache, and release its memory."""
        for row, destination in zip(self.arrivals.rows_of(job), destinations, strict=False):
            self._blocks.copy_in(row, destination)
        self.drop(job)

    def drop(self, job: int) -> None:
        """Release the memory of a read that has ended."""
        self.arrivals.drop(job)


class _Peer:
    """A producer, and the thread that connects to it, again when a connection has ended."""

    def __init__(self, consumer: KVConsumer, place: Place, key: bytes) -> None:
        self.place, self._consumer, self._key = place, consumer, key
        self.connection: Channel | None = None     # one that has proven the secret, with an equal identity
        self.mismatch: str | None = None           # its identity is another one
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()        # the last connection
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name=f"kv-peer {place.name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """The state of the connection."""
        if self.mismatch is not None:
            return "incompatible"
        return "unconnected" if self.connection is None else "connected"

    def close(self) -> None:
        """End the connection and the thread. Idempotent."""
        self._is_closing.set()
        self._has_ended.set()
        connection = self.connection
        if connection is not None:
            connection.close()
        self._thread.join()

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._is_closing.is_set():
            try:
                self._connect()
                pause_s = PAUSE_S
            except (OSError, UnicodeError, ConfigError) as error:
                self._log_once(str(error))
            self._is_closing.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _connect(self) -> None:
        """Connect, and return when the connection has ended. OSError and ConfigError say why there is none."""
        place = self.place
        raw = socket.create_connection((place.host, place.port), timeout=CONNECT_TIMEOUT_S)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seals = answer(raw, self._key, 0, CONNECT_TIMEOUT_S, PRODUCERS)
            keep_alive(raw)
            connection = Channel(raw, decode_report, seals, self._consumer.most_frame_bytes)
            connection.send(Identify(self._consumer.identity))
        except BaseException:
            raw.close()
            raise
        self._has_ended.clear()
        if self._is_closing.is_set():  # `close` may have set before what was cleared now
            connection.close()
            return

        def end() -> None:
            self.connection = None
            connection.close()
            self._consumer.arrivals.end_all(connection)
            self._has_ended.set()
            self._consumer.on_change()

        def handles(report: Identify | Block | ReadEnded) -> bool:
            if isinstance(report, Identify):
                self._identify(connection, report.identity)
            else:
                self._consumer.arrivals.take(connection, report)
            return True

        connection.start(end, handles)
        self._has_ended.wait()
        connection.close()

    def _identify(self, connection: Channel, identity: KVIdentity) -> None:
        """Compare identities, once. ValueError if they differ: it ends the connection."""
        difference = self._consumer.identity.first_difference(identity)
        if difference is None:
            self.mismatch, self._last_error = None, ""
            self.connection = connection
            log.info("connected to %s at %s port %d for KV blocks", *self.place)
            self._consumer.on_change()
            return
        self.mismatch = (
            f"the engine {self.place.name!r} has keys and values of another kind: here {difference} as there"
        )
        self._log_once(self.mismatch)
        raise ValueError(self.mismatch)

    def _log_once(self, text: str) -> None:
        if text != self._last_error:
            self._last_error = text
            log.warning("no KV blocks from %s at %s port %d: %s", *self.place, text)


@dataclass(frozen=True, slots=True)
class KVPeers:
    """An engine's parts in prefill apart from decoding, one or both."""

    consumer: KVConsumer | None
    producer: KVProducer | None

    @property
    def num_left(self) -> int:
        """Number of operations left for an idle engine: reads and leases that will end."""
        num_reads = 0 if self.consumer is None else self.consumer.num_left
        return num_reads + (0 if self.producer is None else len(self.producer.tickets))

    @property
    def is_reading(self) -> bool:
        """True if reads from peers are under way."""
        return self.consumer is not None and self.consumer.num_left > 0

    def check(self, transfer: KVTransfer) -> None:
        """Raise InvalidRequestError for a ticket of a peer that is unknown, or has other keys and values."""
        if self.consumer is not None and transfer.peer:
            self.consumer.check(transfer)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Have a function called, by any thread, when an engine has connected or gone."""
        for part in (self.consumer, self.producer):
            if part is not None:
                part.on_change = on_change

    def step(self) -> None:
        """Copy what has arrived into the cache, and free leases that have ended. For between two steps."""
        if self.consumer is not None:
            self.consumer.step()
        if self.producer is not None:
            self.producer.tickets.step()

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended."""
        if self.consumer is not None:
            self.consumer.wait(timeout_s)

    def stats(self) -> dict[str, float]:
        """Return the counts of blocks moved to and from other engines: `KVStats.transfer`."""
        return {key: value for part in (self.consumer, self.producer) if part for key, value in part.stats.items()}

    def close(self) -> None:
        """End all connections and leases. Idempotent."""
        for part in (self.producer, self.consumer):
            if part is not None:
                part.close()
