"""Blocks from one scheduler to another over TCP: tickets, leases, loads, and peers that are hostile or end."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from quire.cache import kv_tickets
from quire.cache.kv_tickets import binding
from quire.core.config import PreemptionMode
from quire.core.errors import ConfigError, InvalidRequestError
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.sampling_params import BeamSearchParams
from quire.core.sequence import KVTransfer, SequenceStatus
from quire.engine.kv_consumer import Place, decode_report, read_peers
from quire.engine.kv_producer import (
    PRODUCERS,
    Block,
    Identify,
    ReadBlocks,
    ReadEnded,
    Redeem,
    Release,
    decode_command,
)
from quire.engine.parallel.channel import Channel, FrameSeal
from quire.engine.parallel.join import answer, greet
from support.kv_pair import (
    BLOCK_SIZE,
    HOST,
    IDENTITY,
    KEY,
    NAME,
    OWNER,
    Consumer,
    FakeBlocks,
    Producer,
    kv_pair,
)
from support.server import wait_until

PROMPT = list(range(22))  # 5 full blocks
TICKET, OTHER = "a" * 64, "b" * 64
OTHER_ISA = replace(IDENTITY, arithmetic="cpp portable")


@pytest.fixture
def pair() -> Iterator[tuple[Producer, Consumer]]:
    with kv_pair() as opened:
        yield opened


Pair = tuple[Producer, Consumer]


def test_prompt_of_one_engine_is_not_computed_by_the_other(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    assert producer.harness.cache.num_free_blocks == 40 - 5, "its full blocks are kept"
    request = consumer.ask(PROMPT, TICKET)
    assert (request.num_cached_tokens, request.num_peer_tokens, request.num_disk_tokens) == (20, 20, 0)
    assert consumer.harness.executor.num_computed == 2 + 2
    producer.settle()
    assert producer.tickets.counts == {"made": 1, "redeemed": 1}
    assert not consumer.net.arrivals.failures


def test_what_the_consumer_has_is_not_fetched(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    consumer.harness.add(PROMPT[:8], max_tokens=1)
    consumer.run()
    request = consumer.ask(PROMPT, TICKET)
    assert (request.num_cached_tokens, request.num_peer_tokens) == (20, 12)
    assert producer.net.num_sent_blocks == 3
    producer.settle()


def test_ticket_is_good_once(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    consumer.ask(PROMPT, TICKET)
    assert consumer.ask([*PROMPT[1:], 9], TICKET).num_peer_tokens == 0
    assert consumer.net.arrivals.failures == {"refused": 1}
    assert producer.tickets.counts == {"made": 1, "redeemed": 1, "refused": 1}


@pytest.mark.parametrize("other", [{"owner": "another"}, {"salt": "another"}], ids=str)
def test_ticket_is_refused_to_another_owner_and_scope_and_stays_good(pair: Pair, other: dict[str, str]) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    assert consumer.ask([*PROMPT], TICKET, **other).num_peer_tokens == 0
    assert producer.tickets.counts["refused"] == 1
    assert consumer.ask([*PROMPT, 7], TICKET, **({"salt": None} if "salt" in other else {})).num_peer_tokens in (0, 20)
    assert producer.tickets.counts["redeemed"] == (1 if "salt" in other else 0)


def test_ticket_of_a_salt_is_good_for_that_salt(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET, salt="one")
    assert consumer.ask(PROMPT, TICKET, salt="one").num_peer_tokens == 20


def test_ticket_past_its_time_is_refused_and_its_blocks_are_free(pair: Pair) -> None:
    producer, consumer = pair
    now_s = [0.0]
    producer.clock = lambda: now_s[0]
    producer.compute(PROMPT, TICKET)
    now_s[0] = 29.9
    producer.step()
    assert len(producer.tickets) == 1
    now_s[0] = 30.0
    producer.step()
    producer.harness.check()
    producer.harness.assert_empty()
    assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 0
    assert producer.tickets.counts == {"made": 1, "expired": 1, "refused": 1}


def test_time_of_a_ticket_begins_anew_when_it_is_redeemed(pair: Pair) -> None:
    """The tickets behind it, which end before it now, still end in time."""
    tickets, now_s = pair[0].tickets, [0.0]
    pair[0].clock = lambda: now_s[0]
    first, second = (pair[0].compute(PROMPT, name) for name in (TICKET, OTHER))
    now_s[0] = 20.0
    assert first.transfer is not None
    assert tickets.redeem(TICKET, binding(first.transfer, first.scope)) is not None
    left = []
    for now_s[0] in (29.9, 30.0, 49.9, 50.0):
        pair[0].step()
        pair[0].harness.check()
        left.append(tickets.lease_ids)
    both = {first.request_id, second.request_id}
    assert left == [both, {first.request_id}, {first.request_id}, set()]
    assert tickets.counts == {"made": 2, "redeemed": 1, "expired": 2}


def test_check_may_meet_a_ticket_that_is_just_redeemed(pair: Pair) -> None:
    tickets = pair[0].tickets
    first, _ = (pair[0].compute(PROMPT, name) for name in (TICKET, OTHER))
    transfer, scope = first.transfer, first.scope
    assert transfer is not None

    class Blocks(list[int]):
        def __len__(self) -> int:
            tickets.redeem(TICKET, binding(transfer, scope))    # as a connection's thread may at any time
            return super().__len__()

    tickets._tickets[TICKET].blocks = Blocks(tickets._tickets[TICKET].blocks)
    pair[0].harness.check()
    assert tickets.counts["redeemed"] == 1


def test_tickets_of_one_prompt_have_bounded_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ticket has the prompt's tokens, although the blocks are the same: the oldest one ends for the newest."""
    producer, consumer = pair
    producer.compute(PROMPT, "0" * 64)
    monkeypatch.setattr(kv_tickets, "MAX_BYTES", 3 * producer.tickets.num_bytes)
    for number in range(1, 9):
        producer.compute(PROMPT, str(number) * 64)
        producer.harness.check()
        assert producer.tickets.num_bytes <= kv_tickets.MAX_BYTES
    assert producer.tickets.counts == {"made": 9, "given_back": 6}
    assert consumer.ask(PROMPT, "5" * 64).num_peer_tokens == 0
    assert consumer.ask([*PROMPT[:20], 1], "6" * 64).num_cached_tokens == 20


def test_prompt_without_a_full_block_has_no_lease(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute([1, 2, 3], TICKET)
    assert len(producer.tickets) == 0
    assert consumer.ask([1, 2, 3], TICKET).num_cached_tokens == 0


def test_aborted_request_leaves_no_lease() -> None:
    with kv_pair(budget=8) as (producer, _):
        request = producer.harness.add(PROMPT, max_tokens=9)
        request.transfer = replace(producer.compute([5] * 9, OTHER).transfer, ticket=TICKET)  # type: ignore[type-var]
        producer.harness.scheduler.abort(request.request_id)
        assert set(producer.tickets._tickets) == {OTHER}


def test_leases_are_given_back_before_a_request_waits_for_blocks() -> None:
    with kv_pair(num_blocks=12) as (producer, consumer):
        producer.compute(PROMPT, TICKET)
        producer.compute([9] * 16, OTHER)
        assert producer.harness.cache.num_free_blocks == 12 - 9
        large = producer.harness.add([8] * 30, max_tokens=2, ignore_eos=True)
        producer.harness.step()
        assert large.live[0].status is SequenceStatus.RUNNING
        while producer.harness.scheduler.has_requests:
            producer.harness.step()
        producer.harness.check()
        assert producer.tickets.counts["given_back"] >= 1
        assert TICKET not in producer.tickets._tickets, "the oldest goes first"
        assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 0


def test_lease_that_ends_while_it_is_read_costs_what_is_missing(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    sent = producer.net.count_sent

    def end_after_two() -> None:
        sent()
        if producer.net.num_sent_blocks == 2:
            producer.tickets.end(producer.tickets._tickets[TICKET])

    producer.net.count_sent = end_after_two  # type: ignore[method-assign]
    request = consumer.ask(PROMPT, TICKET)
    assert request.num_peer_tokens == 8
    assert consumer.net.arrivals.failures == {"gone": 1}
    producer.settle()


def test_request_that_ends_while_it_loads_ends_the_lease(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    with producer.tickets.lock:      # no block is sent
        request = consumer.add(PROMPT, TICKET)
        consumer.until_loading(request)
        consumer.harness.scheduler.abort(request.request_id)
        consumer.harness.check()
        consumer.harness.assert_empty()
    del consumer.harness.requests[request.request_id]
    consumer.run()
    producer.settle()


def test_consumer_that_ends_ends_its_leases(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    with producer.tickets.lock:
        request = consumer.add(PROMPT, TICKET)
        consumer.until_loading(request)
        consumer.net.close()
    wait_until(lambda: not producer.net.num_consumers)
    producer.settle()
    consumer.run()
    consumer.harness.assert_right(request)


def test_producer_that_ends_costs_computing_and_is_found_again(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    producer.tickets.lock.acquire()
    request = consumer.add(PROMPT, TICKET)
    consumer.until_loading(request)
    ending = threading.Thread(target=producer.net.close)
    for each in list(producer.net._consumers):
        each.close()
    ending.start()
    consumer.run()
    consumer.harness.assert_right(request)
    assert request.num_peer_tokens == 0
    producer.tickets.lock.release()
    ending.join()
    producer.settle()
    assert consumer.ask([1, *PROMPT], OTHER).num_peer_tokens == 0, "computed while nothing listens"
    assert consumer.net.arrivals.failures.keys() <= {"disconnected", "unconnected"}
    producer.listen(port=producer.port)
    consumer.connect()
    producer.compute([2, *PROMPT], OTHER)
    assert consumer.ask([2, *PROMPT], OTHER).num_peer_tokens == 20


def test_late_peer_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    monkeypatch.setattr("quire.engine.kv_reads.READ_LIMIT_S", 0.0)
    with producer.tickets.lock:
        request = consumer.ask(PROMPT, TICKET)
    assert request.num_peer_tokens == 0
    assert consumer.net.arrivals.failures == {"disconnected": 1}
    producer.settle()


def test_pause_of_the_process_makes_no_peer_late(pair: Pair) -> None:
    producer, consumer = pair
    producer.compute(PROMPT, TICKET)
    with producer.tickets.lock:
        loading = consumer.add(PROMPT, TICKET)
        consumer.until_loading(loading)
        wait_until(lambda: consumer.net.step() or bool(len(consumer.net._reads)))
        consumer.net._reads._clock = lambda: time.monotonic() + 3600
        consumer.net.step()
    consumer.run()
    assert loading.num_peer_tokens == 20


def test_loads_are_given_back_before_anything_is_preempted(pair: Pair) -> None:
    producer, _ = pair
    consumer = Consumer(producer.port, num_blocks=12, max_num_seqs=2)
    try:
        consumer.connect()
        producer.compute(PROMPT, TICKET)
        with producer.tickets.lock:
            running = consumer.harness.add([7, 7, 7], max_tokens=38, ignore_eos=True)
            consumer.harness.step()
            loading = consumer.add(PROMPT, TICKET)
            consumer.until_loading(loading)
            while running.live:
                consumer.harness.step()
        consumer.run()
        assert running.num_preemptions == 0
        assert consumer.net.arrivals.failures["given_up"] == 1
    finally:
        consumer.net.close()
    producer.settle()


def test_windows_keep_the_blocks_that_another_engine_asks_for() -> None:
    with kv_pair(window=6) as (producer, _):
        consumer = Consumer(producer.port, window=6)
        try:
            consumer.connect()
            producer.compute(PROMPT, TICKET)
            assert len(producer.tickets) == 1
            assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 20
        finally:
            consumer.net.close()


# --- other identities and secrets -----------------------------------------------------------------------------------


def test_other_identity_is_an_error_that_names_both(pair: Pair) -> None:
    producer, consumer = pair
    producer.net.close()
    producer.listen(OTHER_ISA, producer.port)
    wait_until(lambda: consumer.net.states["incompatible"] == 1)
    request = consumer.harness.add(PROMPT)
    request.transfer = replace(consumer.add([1], TICKET).transfer)  # type: ignore[type-var]
    with pytest.raises(InvalidRequestError, match=r"'p0' .* here arithmetic 'cpp avx2', not 'cpp portable' as there"):
        consumer.net.check(request.transfer)
    wait_until(lambda: not producer.net.num_consumers)


def test_unknown_peer_is_an_error(pair: Pair) -> None:
    _, consumer = pair
    transfer = replace(consumer.add([1], TICKET).transfer, peer="other")  # type: ignore[type-var]
    with pytest.raises(InvalidRequestError, match="'other' is no engine of kv_peers"):
        consumer.net.check(transfer)


def test_other_secret_is_refused(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    producer, _ = pair
    consumer = Consumer(producer.port, key=bytes(31) + b"x")
    wait_until(lambda: "a producer refuses the secret: kv_secret_file must be the same" in caplog.text)
    assert consumer.net.states["unconnected"] == 1
    consumer.net.close()


def test_close_ends_a_connection_that_is_just_being_made(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, _ = pair
    known, proven = threading.Event(), threading.Event()

    def wait_for_close(connection: socket.socket) -> None:  # between the proof of the secret and the first read
        known.wait()
        proven.set()
        peer._is_closing.wait()
        peer._has_ended.wait()

    monkeypatch.setattr("quire.engine.kv_consumer.keep_alive", wait_for_close)
    consumer = Consumer(producer.port)
    (peer,) = consumer.net._peers.values()
    known.set()
    proven.wait()
    closing = threading.Thread(target=consumer.net.close, daemon=True)
    closing.start()
    closing.join(120.0)
    assert not closing.is_alive()
    wait_until(lambda: producer.net.num_consumers == 1)  # the other consumer's


# --- hostile producers ----------------------------------------------------------------------------------------------

Misbehave = Callable[[Channel, ReadBlocks], object]


def block(job: int, index: int, prompt: list[int] = PROMPT, num_bytes: int = FakeBlocks.block_bytes) -> Block:
    tokens = b"".join(each.to_bytes(4, "little") for each in prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return Block(job, index, tokens, memoryview(bytes(num_bytes)))


class HostileProducer:
    """Proves the secret, and answers reads as it likes."""

    def __init__(self, misbehave: Misbehave) -> None:
        self._listener, self._misbehave = socket.create_server((HOST, 0)), misbehave
        self.port = self._listener.getsockname()[1]
        self._channels: list[Channel] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                _, seals = greet(connection, KEY, PRODUCERS)
                channel = Channel(connection, decode_command, seals)
                channel.send(Identify(IDENTITY))
                self._channels.append(channel)

                def handles(command: object, channel: Channel = channel) -> bool:
                    if isinstance(command, ReadBlocks):
                        self._misbehave(channel, command)
                    return True

                channel.start(handles=handles)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in self._channels:
            channel.close()
        self._thread.join()


def raw(channel: Channel, content: bytes) -> None:
    with suppress(OSError):
        channel._socket.sendall(content)


def sealed_wrong(channel: Channel, command: ReadBlocks) -> None:
    content = FrameSeal(bytes(32)).close(frame(block(command.job, 0))[LENGTH_BYTES:])
    raw(channel, len(content).to_bytes(LENGTH_BYTES, "big") + content)


HOSTILE: dict[str, Misbehave] = {
    "tokens of another prompt": lambda channel, read: [
        channel.send(block(read.job, 0, PROMPT[::-1])), channel.send(ReadEnded(read.job))
    ],
    "a short block": lambda channel, read: channel.send(block(read.job, 0, num_bytes=5)),
    "a long block": lambda channel, read: channel.send(block(read.job, 0, num_bytes=5000)),
    "short tokens": lambda channel, read: channel.send(block(read.job, 0, PROMPT[:2])),
    "another order": lambda channel, read: channel.send(block(read.job, 1)),
    "a block before all": lambda channel, read: channel.send(block(read.job, -1)),
    "a block behind the read": lambda channel, read: channel.send(block(read.job, 5, PROMPT * 2)),
    "an unknown job": lambda channel, read: channel.send(block(read.job + 7, 0)),
    "an end of another job": lambda channel, read: channel.send(ReadEnded(read.job + 7)),
    "an end without blocks": lambda channel, read: channel.send(ReadEnded(read.job)),
    "an unknown reason": lambda channel, read: channel.send(ReadEnded(read.job, "x" * 5000)),
    "no message": lambda channel, read: raw(channel, channel._sealed(frame(["nothing"]))),
    "a wrong code": sealed_wrong,
    "a frame without end": lambda channel, read: raw(channel, b"\x00\x00\x01\x00abc"),
    "a frame of 4 GB": lambda channel, read: raw(channel, b"\xff\xff\xff\xff"),
    "another identity": lambda channel, read: channel.send(Identify(OTHER_ISA)),
    "the end": lambda channel, read: channel.close(),
}


@pytest.mark.parametrize("misbehave", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_producer_costs_computing_and_nothing_else(
    misbehave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.kv_reads.READ_LIMIT_S", 0.2)  # one of them sends no end
    hostile = HostileProducer(misbehave)
    consumer = Consumer(hostile.port)
    try:
        consumer.connect()
        request = consumer.ask(PROMPT, TICKET)
        assert request.num_peer_tokens == 0
        assert sum(consumer.net.arrivals.failures.values()) == 1
        consumer.harness.assert_empty()
    finally:
        consumer.net.close()
        hostile.close()


# --- hostile consumers ----------------------------------------------------------------------------------------------


@contextmanager
def raw_consumer(producer: Producer, *, identifies: bool = True) -> Iterator[Channel]:
    """Connect with the secret; the channel has no more than was received."""
    connection = socket.create_connection((HOST, producer.port))
    channel = Channel(connection, decode_report, answer(connection, KEY, 0, kind=PRODUCERS))
    channel.start()
    assert channel.receive() == Identify(IDENTITY)
    if identifies:
        channel.send(Identify(IDENTITY))
    try:
        yield channel
    finally:
        channel.close()


def bound(producer: Producer, ticket: str) -> bytes:
    return producer.tickets._tickets[ticket].binding


def test_commands_before_the_identity_end_the_connection(pair: Pair) -> None:
    producer, _ = pair
    producer.compute(PROMPT, TICKET)
    with raw_consumer(producer, identifies=False) as channel:
        channel.send(Redeem(1, TICKET, bound(producer, TICKET)))
        with pytest.raises(EOFError):
            channel.receive()
    assert len(producer.tickets) == 1


def test_reads_beyond_a_lease_and_of_none_are_refused(pair: Pair) -> None:
    producer, _ = pair
    producer.compute(PROMPT, TICKET)
    with raw_consumer(producer) as channel:
        channel.send(ReadBlocks(1, 1, 0, 5))
        assert channel.receive() == ReadEnded(1, "refused")
        channel.send(Redeem(1, "c" * 5000, bytes(32)))
        channel.send(Redeem(1, TICKET, b"short"))
        channel.send(Redeem(1, TICKET, bound(producer, TICKET)))
        channel.send(Redeem(1, TICKET, bound(producer, TICKET)))
        channel.send(ReadBlocks(1, 2, -9, 1))
        assert channel.receive().index == 0
        assert channel.receive() == ReadEnded(2)
        channel.send(ReadBlocks(1, 3, 4, 1 << 60))
        assert channel.receive().index == 4
        assert channel.receive() == ReadEnded(3, "not_kept")
        channel.send(Release(1))
        channel.send(ReadBlocks(1, 4, 0, 5))
        assert channel.receive() == ReadEnded(4, "refused")
        producer.settle()


def test_second_consumer_does_not_get_a_ticket_that_was_redeemed(pair: Pair) -> None:
    producer, _ = pair
    producer.compute(PROMPT, TICKET)
    binding = bound(producer, TICKET)
    with raw_consumer(producer) as first, raw_consumer(producer) as second:
        for channel in (first, second):
            channel.send(Redeem(1, TICKET, binding))
            channel.send(ReadBlocks(1, 1, 0, 1))
            assert isinstance(channel.receive(), Block if channel is first else ReadEnded)
    producer.settle()


def test_long_commands_end_the_connection(pair: Pair) -> None:
    producer, _ = pair
    with raw_consumer(producer) as channel:
        channel.send(Redeem(1, "d" * (1 << 17), b""))
        with pytest.raises(EOFError):
            channel.receive()


def test_connections_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, _ = pair
    monkeypatch.setattr("quire.engine.kv_producer.MAX_CONNECTIONS", 1)
    with socket.create_connection((HOST, producer.port)) as connection:
        channel = Channel(connection, decode_report, answer(connection, KEY, 0, kind=PRODUCERS))
        channel.start()
        with pytest.raises(EOFError):
            channel.receive()


# --- states ---------------------------------------------------------------------------------------------------------


def test_state_comes_behind_the_blocks() -> None:
    with kv_pair(num_state_slots=8) as (producer, consumer):
        for prompt, num_found in ((PROMPT, 20), ([7] * 20, 16)):
            producer.compute(prompt, TICKET)
            kept = producer.tickets.num_blocks
            assert kept == num_found // BLOCK_SIZE + 3, "blocks, and parts of the state"
            assert producer.harness.cache.states.stats()["kept_slots"] == 1
            before = consumer.harness.executor.num_computed
            request = consumer.ask(prompt, TICKET)
            assert (request.num_cached_tokens, request.num_peer_tokens) == (num_found, num_found)
            assert consumer.harness.executor.num_computed == before + len(prompt) - num_found + 2
            producer.settle()
        assert producer.harness.cache.states.stats()["kept_slots"] == 0
        assert producer.net.num_sent_blocks == 5 + 3 + 4 + 3
        again = consumer.ask([*PROMPT, 1, 2, 3], OTHER)
        assert again.num_cached_tokens == 20, "the state can be found"


def test_states_of_leases_have_half_of_the_slots() -> None:
    """The oldest lease ends for one more; what was given up is computed, with the same answer."""
    with kv_pair(num_state_slots=5, num_blocks=80) as (producer, consumer):
        prompts = {character * 64: [number] * 22 for number, character in enumerate("cde")}
        for ticket, prompt in prompts.items():
            producer.compute(prompt, ticket)
        assert producer.harness.cache.states.stats()["kept_slots"] == 2
        assert producer.tickets.counts["given_back"] == 1
        assert [consumer.ask(prompt, ticket).num_peer_tokens for ticket, prompt in prompts.items()] == [0, 20, 20]
        producer.settle()


def test_states_of_leases_give_way_to_running_sequences() -> None:
    with kv_pair(num_state_slots=3, max_num_seqs=2) as (producer, consumer):
        producer.compute(PROMPT, TICKET)
        assert producer.harness.cache.states.stats()["kept_slots"] == 1
        producer.harness.add_beams([9] * 9, BeamSearchParams(2, 12, ignore_eos=True))
        while producer.harness.scheduler.has_requests:
            producer.harness.step()
        assert (len(producer.tickets), producer.tickets.counts["given_back"]) == (0, 1)
        assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 0
        assert consumer.net.arrivals.failures["refused"] == 1


def test_abort_of_a_request_that_has_ended_leaves_its_ticket_the_state() -> None:
    """A client that leaves as its prompt is computed: the abort comes after the end."""
    with kv_pair(num_state_slots=4, num_blocks=80) as (producer, consumer):
        request = producer.compute(PROMPT, TICKET)
        assert not producer.harness.scheduler.abort(request.request_id)
        for number in range(8):                         # snapshots of others are in all slots but the ticket's
            producer.harness.add([number] * 22, max_tokens=1, ignore_eos=True)
        while producer.harness.scheduler.has_requests:
            producer.harness.step()
        assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 20
        producer.settle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_requests_that_have_fetched_a_state_are_preempted_like_others(mode: PreemptionMode) -> None:
    producer = Producer(num_blocks=80, num_state_slots=12)
    consumer = Consumer(
        producer.port, num_blocks=24, num_state_slots=6, max_num_seqs=3, mode=mode, num_swap_blocks=40, num_swap_slots=4
    )
    try:
        consumer.connect()
        requests = []
        for number, character in enumerate("cde"):
            producer.compute([number] * 22, character * 64)
            requests.append(consumer.harness.add([number] * 22, max_tokens=30, ignore_eos=True))
            requests[-1].transfer = KVTransfer(character * 64, OWNER, NAME)
        loads = consumer.harness.cache.loads
        assert loads is not None
        consumer.harness.step()                         # all wait, and run from the next step on
        wait_until(lambda: consumer.net.step() or not loads.num_loads)
        consumer.run()
        assert [request.num_peer_tokens for request in requests] == [20, 20, 20]
        assert consumer.harness.scheduler.preemption.stats.num_preemptions[mode] > 0
        for request in requests:
            consumer.harness.assert_right(request)
        producer.settle()
        consumer.harness.assert_empty()
    finally:
        consumer.net.close()
        producer.net.close()


def test_prompt_without_a_snapshot_leaves_no_ticket() -> None:
    with kv_pair(num_state_slots=1, max_num_seqs=1) as (producer, consumer):
        producer.compute(PROMPT, TICKET)
        assert producer.tickets.counts == {"stateless": 1}
        producer.settle()
        assert consumer.ask(PROMPT, TICKET).num_peer_tokens == 0


def test_prompt_of_several_branches_without_a_snapshot_counts_once() -> None:
    with kv_pair(num_state_slots=12) as (producer, _):
        harness = producer.harness
        harness.add(PROMPT, n=3, max_tokens=2, ignore_eos=True).transfer = KVTransfer(TICKET, OWNER)
        tree = harness.cache.prefixes.snapshots
        assert tree is not None
        while harness.scheduler.has_requests:
            while tree.evict():
                pass
            harness.step()
        assert producer.tickets.counts == {"stateless": 1}
        producer.settle()


# --- many -----------------------------------------------------------------------------------------------------------


def fetched_by_many(num_requests: int, seed: int, end_rate: float = 0.05, num_state_slots: int = 0) -> int:
    """Run requests, end some, and connections; return the fetched tokens. No block is left on either side."""
    rng, num_fetched = random.Random(seed), 0
    with kv_pair(num_blocks=30, num_state_slots=num_state_slots) as (producer, consumer):
        for number in range(num_requests):
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            salt, ticket = rng.choice([None, "salt"]), f"{number:064x}"
            producer.compute(prompt, ticket, salt)
            request = consumer.add(prompt, ticket, rng.choice([salt, salt, "other"]))
            for _ in range(rng.choice([0, 1, 99])):
                if consumer.harness.scheduler.has_requests:
                    consumer.harness.step()
            is_aborted = rng.random() < 0.1 and consumer.harness.scheduler.abort(request.request_id)
            if rng.random() < end_rate:
                for each in list(producer.net._consumers):
                    each.close()
                consumer.run()
                wait_until(lambda: not producer.net.num_consumers)
                consumer.connect()
            consumer.run()
            consumer.harness.assert_right(request, whole=not is_aborted)
            num_fetched += request.num_peer_tokens
            producer.step()
            producer.harness.check()
        producer.tickets.clear()
        producer.settle()
        consumer.harness.assert_empty()
    return num_fetched


def test_no_block_is_lost_over_many_requests_with_ends_of_connections() -> None:
    assert fetched_by_many(60, seed=0) > 100


@pytest.mark.parametrize("num_state_slots", [3, 12])
def test_no_state_is_lost_over_many_requests_with_ends_of_connections(num_state_slots: int) -> None:
    assert fetched_by_many(60, seed=num_state_slots, num_state_slots=num_state_slots) > 100


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_no_block_is_lost_over_ten_thousand_requests() -> None:
    assert fetched_by_many(10_000, seed=1, end_rate=0.002) > 20_000
    assert fetched_by_many(10_000, seed=2, end_rate=0.002, num_state_slots=6) > 10_000


# --- the file of peers ------------------------------------------------------------------------------------------------


def test_peers_are_read_from_the_file(tmp_path: object) -> None:
    path = f"{tmp_path}/peers"
    with open(path, "w", encoding="utf-8") as file:
        file.write("# producers\np0 10.0.0.1:14579\n\np1 [::1]:1  # IPv6\n")
    assert read_peers(path) == [Place("p0", "10.0.0.1", 14579), Place("p1", "::1", 1)]


@pytest.mark.parametrize(("text", "message"), [
    ("p0\n", "line 1: expected NAME HOST:PORT, got 'p0'"),
    ("p0 host\n", "line 1: expected NAME HOST:PORT"),
    ("p0 host:0\n", "expected NAME HOST:PORT"),
    ("p0 host:70000\n", "expected NAME HOST:PORT"),
    ("p0 :5\n", "expected NAME HOST:PORT"),
    ("p 0 host:5\n", "expected NAME HOST:PORT"),
    ("p'0 host:5\n", "expected NAME HOST:PORT"),
    ("p0 a:5\np0 b:5\n", "line 2: p0 is there already"),
    ("# none\n", "must have 1 to 64 producers, got 0"),
    ("".join(f"p{number} host:5\n" for number in range(65)), "must have 1 to 64 producers, got 65"),
    ("#" * 70_000, "has more than 65536 bytes"),
])  # fmt: skip
def test_wrong_file_of_peers_names_the_line(tmp_path: object, text: str, message: str) -> None:
    path = f"{tmp_path}/peers"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    with pytest.raises(ConfigError, match=message):
        read_peers(path)


def test_missing_file_of_peers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kv_peers /nowhere/peers cannot be read"):
        read_peers("/nowhere/peers")
