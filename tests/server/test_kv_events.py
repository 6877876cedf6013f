"""KV events of a served engine, over real sockets: a router knows what is cached, and when nothing is."""

import json
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from support.event_reader import EventReader
from support.metrics_page import num_restarts, read_metrics
from support.server import ServerProcess, running_server, wait_until

CONFIG = {
    "enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0",
    "topic": "kv@pod@demo",
}  # fmt: skip
FLAGS = ("--num-kv-blocks", "64", "--max-model-len", "1024", "--restart-engine", "1")
PROMPT = [5 + number % 300 for number in range(100)]
LIMIT_MS = 20_000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Return a server with events, and with 64 blocks."""
    with running_server(*FLAGS, "--kv-events-config", json.dumps(CONFIG), is_new=False) as server:
        yield server


class Subscriber:
    """A router's end: the view of a cache, and the number of the next batch."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.reader, self.next = EventReader(), 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._socket.subscribe("kv@")
        self._socket.connect(endpoint)
        self._replays.connect(replay_endpoint)

    def read(self) -> EventReader:
        """Apply what is there; ask for what was missed. Return the view."""
        while self._socket.poll(50):
            number, batch = self._socket.recv_multipart()[1:]
            if int.from_bytes(number, "big") > self.next:
                self._catch_up()
            self._apply(number, batch)
        self._catch_up()
        return self.reader

    def _catch_up(self) -> None:
        self._replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while self._replays.poll(LIMIT_MS):
            _, _, number, batch = self._replays.recv_multipart()
            if not batch:
                return
            self._apply(number, batch)

    def _apply(self, number: bytes, batch: bytes) -> None:
        if int.from_bytes(number, "big") < self.next:
            return                              # replayed before
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        self.reader.apply(msgspec.msgpack.encode(events))

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


def ask(server: ServerProcess, prompt: list[int]) -> int:
    """Return the cached tokens of a prompt that is computed."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return int(server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_router_knows_what_is_cached_until_the_engine_dies(server: ServerProcess) -> None:
    (source,) = server.get("/kv_event_sources").json().values()
    assert source["topic"] == CONFIG["topic"]
    router = Subscriber(source["endpoint"], source["replay_endpoint"])
    try:
        assert router.reader.num_cached(PROMPT, 16) == 0
        ask(server, PROMPT)
        wait_until(lambda: router.read().num_cached(PROMPT, 16) == 96)
        assert ask(server, PROMPT) >= 96, "as the router expects"
        for first in range(12):                                     # far more than 64 blocks
            ask(server, [first, *PROMPT * 4])

        def agrees() -> bool:
            return len(router.read().blocks) == read_metrics(server.url)['quire:kv_blocks{state="cached"}']

        wait_until(agrees)
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: not router.read().blocks)
        wait_until(lambda: num_restarts(server.url) == 1)
        ask(server, PROMPT)
        wait_until(lambda: router.read().num_cached(PROMPT, 16) == 96)
    finally:
        router.close()
