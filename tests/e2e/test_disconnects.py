"""Clients that go away at any moment leave nothing behind: no request, no block, no place in the queue."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from support.clients import LIMIT_S, MODEL
from support.cut_requests import MOMENTS, cut_request
from support.metrics_page import wait_until_idle
from support.reciting_model import TEXT, Reciter
from support.server import ServerProcess, running_server

NUM_REQUESTS = 500
NUM_AT_ONCE = 20


@pytest.fixture(scope="module")
def crowded_server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve with so few seats and blocks that requests wait, and now and then one is preempted."""
    arguments = ("--max-num-seqs", "16", "--num-kv-blocks", "144", "--served-model-name", MODEL)
    with running_server(str(reciter.folder), *arguments) as running:
        yield running


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
    samples = wait_until_idle(crowded_server.url)
    assert samples["quire:requests_aborted_total"] > NUM_REQUESTS / 10
    assert samples['quire:kv_blocks{state="free"}'] + samples['quire:kv_blocks{state="cached"}'] == 144
    body = {"prompt": reciter.prompt(), "max_tokens": len(reciter.script), "temperature": 0}
    answer = httpx.post(f"{crowded_server.url}/v1/completions", json=body, timeout=LIMIT_S).json()
    assert answer["choices"][0]["text"] == TEXT
    wait_until_idle(crowded_server.url)
