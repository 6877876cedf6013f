"""A small real server that streams completions: what it sends, and when, is up to the test."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Body = dict[str, Any]
Stream = Callable[[Body], AsyncIterator[bytes]]
DONE = b"data: [DONE]\n\n"


def event(content: Body) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token_chunk(text: str = " a") -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})


def usage_chunk(num_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}})


async def all_tokens(body: Body) -> AsyncIterator[bytes]:
    """What was asked for, a chunk per token, at once."""
    for _ in range(body["max_tokens"]):
        yield token_chunk()
    yield usage_chunk(body["max_tokens"])
    yield DONE


class CompletionsServer:
    """Serves one model named `tiny`; keeps what it was asked, and how many requests were open at once."""

    def __init__(self, stream: Stream = all_tokens, metrics_page: Callable[[], str] | None = None) -> None:
        self.stream = stream
        self.metrics_page = metrics_page
        self.refusals: Iterator[tuple[int, Body] | None] = iter(())  # for each request in turn: status and body
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.num_open = 0
        self.most_open = 0
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if (refusal := next(self.refusals, None)) is not None:
            return web.json_response(refusal[1], status=refusal[0])
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for piece in self.stream(self.bodies[-1]):
                await response.write(piece)
            return response
        finally:
            self.num_open -= 1

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.metrics_page is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics_page())

    @contextmanager
    def in_a_thread(self) -> Iterator[str]:
        """Serve until the block ends; yield the URL."""
        loop = asyncio.new_event_loop()
        server = TestServer(self.app)
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(server.start_server(), loop).result(120)
            yield str(server.make_url("/")).rstrip("/")
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(120)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(120)
            loop.close()
