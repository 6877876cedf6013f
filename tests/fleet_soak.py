"""Soak of several engines behind one server: an engine is killed again and again, and every request ends exactly once.

    PYTHONPATH=tests python tests/fleet_soak.py [REQUESTS [SECONDS]]

A request ends with its whole answer, or with the error of a dead engine: a 503, or one error event as the last event of
a stream. `make fleet-soak` asks 10,000 requests and kills an engine every 20 seconds; a test asks fewer and kills by
number of answers.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.metrics_page import read_metrics
from support.server import ServerProcess, engine_pids, running_server

NUM_ENGINES, NUM_CLIENTS, NUM_PREFIXES = 3, 24, 8
LIMIT_S = 300.0
FLAGS = ("-dp", str(NUM_ENGINES), "--num-kv-blocks", "900", "--max-model-len", "512", "--max-num-seqs", "16")


@dataclass(slots=True)
class Tally:
    """What requests ended with."""

    num_answered: int = 0
    num_lost: int = 0           # with their engine
    num_kills: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        """Requests that ended as they should."""
        return self.num_answered + self.num_lost

    def count(self, ended: str) -> None:
        """Count an end: answered, lost, or a description of what is wrong."""
        if ended == "answered":
            self.num_answered += 1
        elif ended == "lost":
            self.num_lost += 1
        else:
            self.wrong.append(ended)


def body_of(number: int) -> dict[str, Any]:
    """Return the body of a request: one of some common prefixes, then tokens of its own."""
    generator = random.Random(number)
    prefix = [300 + generator.randrange(NUM_PREFIXES)] * 64
    own = [300 + generator.randrange(1000) for _ in range(generator.randrange(1, 60))]
    return {
        "prompt": prefix + own, "max_tokens": generator.randrange(1, 48), "ignore_eos": True, "seed": number,
        "n": generator.choice((1, 1, 1, 2)), "stream": generator.random() < 0.5,
    }  # fmt: skip


async def end_of(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Ask a request; return what it ended with."""
    response = await http.post("/v1/completions", json=body)
    if response.status_code == 503:
        return "lost" if response.json()["error"]["code"] == "engine_unhealthy" else response.text
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text}"
    if not body["stream"]:
        answer = response.json()
        whole = [choice["finish_reason"] == "length" for choice in answer["choices"]] == [True] * body["n"]
        right = answer["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
        return "answered" if whole and right else response.text
    return end_of_stream(response.text, body["n"])


def end_of_stream(text: str, n: int) -> str:
    """Return what a stream ended with: each choice exactly once, or one error behind which nothing is."""
    events = [each for each in text.removesuffix("\n\n").split("\n\n") if not each.startswith(":")]  # no comments
    if not events or events.pop() != "data: [DONE]" or "data: [DONE]" in events:
        return f"not exactly one end: {text[-300:]}"
    records = [json.loads(event.removeprefix("data: ")) for event in events]
    errors = [place for place, record in enumerate(records) if "error" in record]
    if errors:
        is_last = errors == [len(records) - 1]
        return "lost" if is_last and records[-1]["error"]["code"] == "engine_unhealthy" else f"errors: {text[-300:]}"
    finished = [choice["index"] for record in records for choice in record["choices"] if choice["finish_reason"]]
    return "answered" if sorted(finished) == list(range(n)) else f"finished {finished}: {text[-300:]}"


async def run_soak(
    server: ServerProcess, num_requests: int, kill: Callable[[Tally], Awaitable[None]], tell: Callable[[Tally], None]
) -> Tally:
    """Ask all requests while `kill` runs; return what they ended with, when the server is idle and whole again."""
    tally, numbers = Tally(), iter(range(num_requests))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            tally.count(await end_of(http, body_of(number)))
            if number % 500 == 499:
                tell(tally)

    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
        killing = asyncio.create_task(kill(tally))
        await asyncio.gather(*(client(http) for _ in range(NUM_CLIENTS)))
        killing.cancel()
        await asyncio.wait((killing,))
    await until(lambda: is_at_rest(server, tally.num_kills))
    return tally


def kill_one(server: ServerProcess, tally: Tally) -> bool:
    """Kill an engine, if all serve; return whether one was killed."""
    if not is_whole(server, tally.num_kills):
        return False
    os.kill(engine_pids(server)[tally.num_kills % NUM_ENGINES], signal.SIGKILL)
    tally.num_kills += 1
    return True


def is_whole(server: ServerProcess, num_kills: int) -> bool:
    """Whether each killed engine has been replaced by one that serves."""
    return total(read_metrics(server.url), "quire:engine_restarts_total") == num_kills


def is_at_rest(server: ServerProcess, num_kills: int) -> bool:
    """Whether all engines serve, and no request waits, runs or holds a block."""
    samples = read_metrics(server.url)
    held = total(samples, "quire:kv_blocks{", 'state="used"')
    waiting, running = (total(samples, f"vllm:num_requests_{state}") for state in ("waiting", "running"))
    return held == waiting == running == 0 and is_whole(server, num_kills)


def total(samples: Mapping[str, float], name: str, label: str = "") -> float:
    """Return the sum of a metric over engines, of the series with a label."""
    return sum(value for key, value in samples.items() if key.startswith(name) and label in key)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state of the server."""
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


def main(num_requests: int, every_s: float) -> int:
    """Run the soak; return the exit status."""
    begun_s = time.monotonic()

    def tell(tally: Tally) -> None:
        seconds = time.monotonic() - begun_s
        ends = f"{tally.num_answered} answered, {tally.num_lost} lost, {tally.num_kills} kills"
        print(f"{seconds:6.0f} s: {ends}", flush=True)

    with running_server(*FLAGS, is_new=True) as server:

        async def kill(tally: Tally) -> None:
            while True:
                await asyncio.sleep(every_s)
                kill_one(server, tally)

        tally = asyncio.run(run_soak(server, num_requests, kill, tell))
        tell(tally)
        status = server.stop()
    for wrong in tally.wrong[:10]:
        print(f"WRONG: {wrong}")
    return int(bool(tally.wrong) or tally.num_ended != num_requests or status != 0 or not tally.num_kills)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, float(sys.argv[2]) if len(sys.argv) > 2 else 20.0))
