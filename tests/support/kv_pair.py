"""Schedulers over fake executors that hand blocks over by TCP, as a producer and a consumer do."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from quire.cache.kv_tickets import Tickets
from quire.cache.loads import Loads
from quire.core.arrays import Array
from quire.core.kv_identity import NO_STATES, KVIdentity, StateParts
from quire.core.sequence import KVTransfer, Request
from quire.engine.kv_consumer import KVConsumer, Place
from quire.engine.kv_producer import KVProducer
from support.fake_executor import FakeState
from support.nodes import free_port
from support.scheduling import Harness
from support.server import wait_until

KEY, OWNER, NAME, HOST = bytes(32), "owner", "p0", "127.0.0.1"
BLOCK_SIZE = 4
IDENTITY = KVIdentity("spec", "weights", "float32", "", "float32", BLOCK_SIZE, "layout", "cpp avx2", "rotary", "", "")


class FakeBlocks:
    """The slots of a fake executor, as bytes: stands in for `quire.execution.kv_store.CacheBlocks`.

    A state has three parts, which all say the same: the position, and both halves of the digest.
    """

    block_bytes = 8 * BLOCK_SIZE

    def __init__(self, harness: Harness) -> None:
        self._memory, self._states = harness.executor.memory, harness.executor.states
        self.parts = StateParts(harness.num_blocks, 3) if self._states else NO_STATES
        self._partial: dict[int, FakeState] = {}

    def copy_out(self, block: int, row: Array) -> None:
        if (number := block - self.parts.num_blocks) >= 0 and self._states:
            state = self._states[number // 3]
            assert state is not None
            assert not state.ring, "no snapshot"
            row.view(np.int64)[:] = state.committed, *divmod(state.digest, 1 << 32), number % 3
            return
        row[:] = np.array(self._memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE], np.int64).view(np.uint8)

    def copy_in(self, row: Array, block: int) -> None:
        if (number := block - self.parts.num_blocks) >= 0 and self._states:
            self._put(*divmod(number, 3), *row.view(np.int64).tolist())
            return
        self._memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = row.view(np.int64).tolist()

    def _put(self, slot: int, part: int, committed: int, high: int, low: int, sent_part: int) -> None:
        """Write a part of a state; the last one makes it whole."""
        state = FakeState(committed, (high << 32) + low, ())
        assert part == sent_part
        if not part:
            self._partial[slot], self._states[slot] = state, None
        assert self._partial[slot] == state, "parts of two states"
        if part == 2:
            self._states[slot] = self._partial.pop(slot)


class Producer:
    """A scheduler that keeps blocks for others. `clock`: of its leases."""

    def __init__(self, num_blocks: int = 40, **settings: object) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.harness = Harness(num_blocks, caching=True, make_disk=self._open, **settings)  # type: ignore[arg-type]

    def _open(self, harness: Harness) -> "Producer":
        loads = harness.cache.loads = Loads(harness.cache, FakeBlocks.block_bytes)
        self._blocks = FakeBlocks(harness)
        self.tickets = loads.tickets = Tickets(harness.cache, 30.0, self._now, self._blocks.parts)
        self.port = free_port(HOST)     # tests listen there again: no other socket gets it meanwhile
        self.listen(port=self.port)
        return self

    def _now(self) -> float:
        return self.clock()

    def listen(self, identity: KVIdentity = IDENTITY, port: int = 0) -> None:
        """Listen, again after a `close` of `net`."""
        self.net = KVProducer(self.tickets, self._blocks, identity, HOST, port, KEY)  # type: ignore[arg-type]

    def step(self) -> None:
        self.tickets.step()

    def compute(self, prompt: list[int], ticket: str, salt: str | None = None, owner: str = OWNER) -> Request:
        """Compute a prompt, and keep its blocks."""
        request = self.harness.add(prompt, salt=salt, max_tokens=1, ignore_eos=True)
        request.transfer = KVTransfer(ticket, owner)
        while self.harness.scheduler.has_requests:
            self.harness.step()
        self.harness.assert_right(request)
        return request

    def settle(self) -> None:
        """Wait until nothing is kept any more."""

        def is_empty() -> bool:
            self.tickets.step()
            return not len(self.tickets)

        wait_until(is_empty)
        self.harness.check()
        self.harness.assert_empty()


class Consumer:
    """A scheduler that fetches blocks."""

    def __init__(self, port: int, num_blocks: int = 40, key: bytes = KEY, **settings: object) -> None:
        self._places, self._key = [Place(NAME, HOST, port)], key
        self.harness = Harness(num_blocks, caching=True, make_disk=self._open, **settings)  # type: ignore[arg-type]

    def _open(self, harness: Harness) -> "Consumer":
        loads = harness.cache.loads = Loads(harness.cache, FakeBlocks.block_bytes)
        self.net = loads.peers = KVConsumer(
            loads, FakeBlocks(harness), BLOCK_SIZE, IDENTITY, self._places, self._key  # type: ignore[arg-type]
        )  # fmt: skip
        return self

    def step(self) -> None:
        self.net.step()
        if self.net.num_left:
            self.net.wait(0.01)

    def connect(self) -> None:
        """Wait until the producer is connected."""
        wait_until(lambda: self.net.states["connected"] == 1)

    def add(self, prompt: list[int], ticket: str, salt: str | None = None, owner: str = OWNER) -> Request:
        """Queue a request with a ticket."""
        request = self.harness.add(prompt, salt=salt, max_tokens=3, ignore_eos=True)
        request.transfer = KVTransfer(ticket, owner, NAME)
        return request

    def ask(self, prompt: list[int], ticket: str, salt: str | None = None, owner: str = OWNER) -> Request:
        """Run a request with a ticket to its end, and check its answer."""
        request = self.add(prompt, ticket, salt, owner)
        self.run()
        self.harness.assert_right(request)
        return request

    def run(self) -> None:
        """Run to the end, also of reads that are not wanted any more."""
        self.harness.run()
        wait_until(lambda: self.net.step() or not self.net.num_left)
        self.harness.check()
        assert len(self.net.arrivals.free) == len(self.net.arrivals.rows), "places are lost"

    def until_loading(self, request: Request) -> None:
        """Step until a request waits for its blocks."""
        loads = self.harness.cache.loads
        assert loads is not None
        while not loads.is_loading(request.request_id):
            self.harness.step()


@contextmanager
def kv_pair(**settings: object) -> Iterator[tuple[Producer, Consumer]]:
    """Open a producer and a consumer that are connected. `num_state_slots` are those of each."""
    producer = Producer(**settings)  # type: ignore[arg-type]
    consumer = Consumer(producer.port, num_state_slots=settings.get("num_state_slots", 0))
    try:
        consumer.connect()
        yield producer, consumer
    finally:
        consumer.net.close()
        producer.net.close()
