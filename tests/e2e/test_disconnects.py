"""Clients that go away at any moment leave nothing behind: no request, no block, no place in the queue."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.clients import LIMIT_S, MODEL
from support.metrics_page import is_idle, read_metrics, wait_until_idle
from support.reciting_model import TEXT, Reciter
from support.server import ServerProcess, running_server

NUM_REQUESTS = 500
NUM_AT_ONCE = 20
MOMENTS = ("in the head", "in the body", "at once", "after a while", "in the answer", "after it")
LONGEST_WAIT_S = 0.2
LEFT_BEHIND_LIMIT_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, not closed


@pytest.fixture(scope="module")
def crowded_server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve with so few seats and blocks that requests wait, and now and then one is preempted."""
    arguments = ("--max-num-seqs", "16", "--num-kv-blocks", "144", "--served-model-name", MODEL)
    with running_server(str(reciter.folder), *arguments) as running:
        yield running


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route and a body for it, whose answer takes from no time to seconds."""
    fields = {"stream": rng.random() < 0.6, "n": rng.choice([1, 1, 1, 3, 8]), "max_tokens": rng.choice([1, 30, 250])}
    fields |= {"ignore_eos": True, "logprobs": rng.choice([None, 1]), "stop": rng.choice([None, "nowhere"])}
    num_tokens = rng.randint(1, 100)
    if rng.random() < 0.3:
        fields |= {"logprobs": fields["logprobs"] is not None}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * num_tokens}], **fields}
    return "/v1/completions", {"prompt": [rng.randrange(3, 200) for _ in range(num_tokens)], **fields}


async def cut_request(port: int, rng: random.Random, moment: str) -> None:
    """Send a request, or a part of one, and go away."""
    path, fields = random_body(rng)
    if moment == "after it":
        fields |= {"n": 1, "max_tokens": 8}
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\n\r\n"
    whole = head.encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lengths = {"in the head": rng.randrange(1, len(head)), "in the body": rng.randrange(len(head), len(whole))}
    writer.write(whole[: lengths.get(moment, len(whole))])
    await writer.drain()
    if moment == "after a while":
        await asyncio.sleep(rng.uniform(0, LONGEST_WAIT_S))
    if moment == "in the answer":
        await reader.read(rng.randint(1, 3000))
    if moment == "after it":
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()


async def cut_many(port: int, seed: int) -> None:
    rng, seats = random.Random(seed), asyncio.Semaphore(NUM_AT_ONCE)

    async def cut(seed: int, moment: str) -> None:
        async with seats:
            await cut_request(port, random.Random(seed), moment)

    async with asyncio.TaskGroup() as group:
        for index in range(NUM_REQUESTS):
            group.create_task(cut(rng.randrange(2**32), MOMENTS[index % len(MOMENTS)]))


def test_requests_that_are_cut_leave_nothing(crowded_server: ServerProcess, reciter: Reciter) -> None:
    asyncio.run(cut_many(crowded_server.port, seed=0))
    wait_until_idle(crowded_server.url, LEFT_BEHIND_LIMIT_S)
    samples = read_metrics(crowded_server.url)
    assert samples["quire:requests_aborted_total"] > NUM_REQUESTS / 10
    assert samples['quire:kv_blocks{state="free"}'] + samples['quire:kv_blocks{state="cached"}'] == 144
    body = {"prompt": reciter.prompt(), "max_tokens": len(reciter.script), "temperature": 0}
    answer = httpx.post(f"{crowded_server.url}/v1/completions", json=body, timeout=LIMIT_S).json()
    assert answer["choices"][0]["text"] == TEXT
    assert is_idle(crowded_server.url)
