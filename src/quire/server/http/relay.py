"""Relay of a request to another server: as it came, with its headers; the answer comes back piece by piece."""

import asyncio
from collections.abc import Awaitable

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from quire.server.errors import ApiError, body_memory_full
from quire.server.options import Limits

# Headers of one connection, not of the message; and those that each server sets by itself.
_OF_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect", b"proxy-connection",
    b"host", b"date", b"server",
})  # fmt: skip
_STREAM = "text/event-stream"


class ClientGoneError(Exception):
    """The client has disconnected: none is left to answer."""


class Reply:
    """The `send` of one request. `is_forwarded`: another server logs it; `is_stream`: it is server-sent events."""

    __slots__ = ("_send", "is_forwarded", "is_stream", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_forwarded = self.is_stream = False
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a message of a response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class HeldBodies:
    """Whole bodies, bounded each and together, until they are released."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num_bytes = limits, 0

    async def read(self, receive: Receive) -> bytes:
        """Return the whole body. ApiError 413, 503 or 408; ClientGoneError if the client disconnects."""
        limits, received = self._limits, bytearray()
        try:
            async with asyncio.timeout(limits.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    if len(received) + len(piece) > limits.max_body_bytes:
                        told = f"the body is longer than {limits.max_body_bytes} bytes (max_body_bytes)"
                        raise ApiError(413, told, code="request_too_large")
                    if self._num_bytes + len(piece) > limits.max_total_body_bytes:
                        raise body_memory_full(limits.max_total_body_bytes)
                    self._num_bytes += len(piece)
                    received += piece
                    if not message.get("more_body", False):
                        return bytes(received)
        except TimeoutError:
            self._num_bytes -= len(received)
            told = f"the body took more than {limits.receive_timeout:g} s (receive_timeout)"
            raise ApiError(408, told, code="request_timeout", headers={"Connection": "close"}) from None
        except BaseException:
            self._num_bytes -= len(received)
            raise

    def release(self, body: bytes) -> None:
        """Release a body that was read."""
        self._num_bytes -= len(body)


def sent_headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the headers of a request that are sent on."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
            if name not in _OF_CONNECTION and name != b"content-length"]  # fmt: skip


async def relay(session: aiohttp.ClientSession, base: str, scope: Scope, body: bytes, sender: Reply) -> None:
    """Send a request to the server at `base`, and its answer back. aiohttp's errors, and OSError, pass through."""
    query = scope["query_string"].decode("latin-1")
    url = URL(f"{base}{scope['raw_path'].decode('latin-1')}{'?' + query if query else ''}", encoded=True)
    request = session.request(
        scope["method"], url, headers=sent_headers(scope), data=body or None, allow_redirects=False
    )
    async with request as response:
        sender.is_forwarded = True
        sender.is_stream = response.content_type == _STREAM
        own = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _OF_CONNECTION]
        await sender.send({"type": "http.response.start", "status": response.status, "headers": own})
        async for piece in response.content.iter_any():
            await sender.send({"type": "http.response.body", "body": piece, "more_body": True})
        await sender.send({"type": "http.response.body", "body": b""})


async def until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work of a request after its body was read; cancel it when the client disconnects."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait((working, gone))


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
