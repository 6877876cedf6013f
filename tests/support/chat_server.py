"""A small OpenAI server on a port of its own, for clients: it answers by a script and remembers what it was asked."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """What the server does with one request for a chat completion."""

    chunks: tuple[bytes, ...] = ()           # each sent as a piece of its own
    status: int = 200
    content_type: str = "text/event-stream"
    holds: bool = False                      # after the last chunk, wait until the client goes away


@dataclass
class ChatServer:
    """Where it listens, what it will say, and what it was asked."""

    replies: list[Reply] = field(default_factory=list)
    models: tuple[str, ...] = ("first-model", "second-model")
    api_key: str | None = None
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)   # a client left before its answer ended

    async def list_models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong key", "code": "invalid_api_key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        reply = self.replies.pop(0)
        response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
        await response.prepare(request)
        try:
            for chunk in reply.chunks:
                await response.write(chunk)
            if reply.holds:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise
        return response


def frame(**fields: object) -> bytes:
    """Return one event with a chunk of a completion, or whatever else."""
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def said(text: str, finish_reason: str | None = None) -> bytes:
    """Return the event that brings `text`."""
    return frame(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}])


def answer(*texts: str, usage: dict[str, int] | None = None) -> Reply:
    """Return a whole answer, as a good server streams it."""
    end = [frame(choices=[], usage=usage)] if usage else []
    role = frame(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    return Reply((role, *map(said, texts), said("", "stop"), *end, DONE))


def refusal(status: int, message: str, code: str | None = None) -> Reply:
    """Return an error in the contract's form."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Reply((json.dumps({"error": error}).encode(),), status, "application/json")


@contextmanager
def running(server: ChatServer) -> Iterator[ChatServer]:
    """Serve on a free port of the loopback, from a thread of its own."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=120)
        loop.close()
