"""A burst of twenty times the capacity: admitted requests are answered, others refused at once, and all goes on."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from support.clients import LIMIT_S
from support.http_app import parse
from support.metrics_page import wait_until_idle
from support.reciting_model import TEXT, Reciter
from support.server import ServerProcess, running_server
from support.stopping import stopped

NUM_SEATS, NUM_PLACES = 4, 8
NUM_REQUESTS = 20 * (NUM_SEATS + NUM_PLACES)
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def small_server(reciter: Reciter) -> Iterator[ServerProcess]:
    arguments = ("--max-num-seqs", str(NUM_SEATS), "--max-queued-requests", str(NUM_PLACES))
    with running_server(str(reciter.folder), *arguments) as running:
        yield running


async def burst(server: ServerProcess, count: int, body: dict[str, Any], num_held: int = 0) -> list[httpx.Response]:
    """Send all requests at once, each in one piece on a connection of its own.

    With `num_held` the engine stands still until all but so many have their answers: these need none of its work.
    """
    content, engine = json.dumps(body).encode(), stopped(server.engine_pid()) if num_held else nullcontext()
    head = f"POST {PATH} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> httpx.Response:
        writer.write(head.encode() + content)
        answer = parse(await reader.read())
        writer.close()
        return httpx.Response(answer.status, headers=answer.headers, content=answer.body)

    async with asyncio.timeout(LIMIT_S):
        with engine:
            asking = [asyncio.create_task(ask(*stream)) for stream in streams]
            while sum(task.done() for task in asking) < count - num_held:
                await asyncio.sleep(0.01)
        return await asyncio.gather(*asking)


def test_burst_is_answered_or_refused_at_once(small_server: ServerProcess, reciter: Reciter) -> None:
    """A refusal does not wait for admitted requests. How long it takes is what bench/overload.py measures."""
    server, engine = small_server, small_server.engine_pid()
    body = {"prompt": reciter.prompt(), "max_tokens": len(reciter.script), "temperature": 0}
    responses = asyncio.run(burst(server, NUM_REQUESTS, body, num_held=NUM_SEATS + NUM_PLACES))
    accepted = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    assert (len(accepted), len(accepted) + len(refused)) == (NUM_SEATS + NUM_PLACES, NUM_REQUESTS)
    assert {response.json()["choices"][0]["text"] for response in accepted} == {TEXT}
    for response in refused:
        assert response.json()["error"]["code"] == "server_overloaded"
        assert int(response.headers["Retry-After"]) >= 1
    wait_until_idle(server.url)
    assert server.post(PATH, body).json()["choices"][0]["text"] == TEXT
    assert server.engine_pid() == engine


def test_idle_server_takes_a_burst_that_fills_seats_and_queue(small_server: ServerProcess, reciter: Reciter) -> None:
    wait_until_idle(small_server.url)
    body = {"prompt": reciter.prompt(), "max_tokens": 4}
    responses = asyncio.run(burst(small_server, NUM_SEATS + NUM_PLACES, body))
    assert [response.status_code for response in responses] == [200] * (NUM_SEATS + NUM_PLACES)
