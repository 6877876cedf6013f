"""An OpenAI server answers: streamed chat completions over HTTP.

Each answer has a connection of its own, and stopping the answer closes it, which tells the server to stop too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from quire.cli.chat import protocol
from quire.cli.chat.back_end import ChatError, Update
from quire.cli.chat.sse import EventDecoder
from quire.text.chat_template import Message

MAX_BODY_BYTES = 1024 * 1024       # of an answer that is no stream
_CONNECT_S = 10.0
_SILENCE_S = 600.0                 # a request may wait in the server's queue for a while
_DONE = "[DONE]"

T = TypeVar("T")


class RemoteBackEnd:
    """A model of an OpenAI server. `sampling` goes into each request as it is; the rest the server decides."""

    def __init__(
        self, url: str, api_key: str | None, model_name: str | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        self._base = base_url(url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {_checked_key(api_key)}"}
        self._model_name = model_name or _run(self._first_model())
        self._sampling = dict(sampling or {})

    @property
    def greeting(self) -> str:
        """Which model, and where."""
        return f"Chatting with {self._model_name} at {self._base}."

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Ask the server and pass on what it streams. ChatError for what it refuses, and when the stream breaks off."""
        _run(self._answer(messages, on_update))

    async def _answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        body = self._sampling | {
            "model": self._model_name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        has_ended = False
        async with self._request("POST", "/chat/completions", json=body) as response:
            if response.content_type != "text/event-stream":
                raise ChatError(f"{self._base} sent {response.content_type} instead of a stream of events")
            decoder = EventDecoder()
            async for chunk in response.content.iter_any():
                for event in decoder.feed(chunk):
                    if event == _DONE:
                        return
                    update = protocol.read_frame(event)
                    has_ended = has_ended or update.finish_reason is not None
                    on_update(update)
        if not has_ended:
            raise ChatError(f"{self._base} closed the stream before the answer ended")

    async def _first_model(self) -> str:
        async with self._request("GET", "/models") as response:
            name = protocol.first_model(await _read_body(response))
        if name is None:
            raise ChatError(f"{self._base} lists no model; give --model-name")
        return name

    @asynccontextmanager
    async def _request(self, method: str, path: str, **content: Any) -> AsyncIterator[aiohttp.ClientResponse]:  # noqa: ANN401
        """Yield a response whose status is fine. Whatever goes wrong, now or while it is read, is a ChatError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, self._base + path, **content) as response,
            ):
                if response.status != 200:
                    raise protocol.refusal(response.status, response.reason, await _read_body(response))
                yield response
        except aiohttp.ClientConnectorError as error:
            raise ChatError(f"cannot connect to {self._base}: {error.os_error.strerror or error.os_error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ChatError(f"the connection to {self._base} failed: {error or type(error).__name__}") from error


def base_url(url: str) -> str:
    """Return the address under which the routes lie, which ends in /v1. ChatError when it is none."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or "@" in url or "?" in url or "#" in url:
        raise ChatError(f"--url must look like http://HOST:PORT, with or without /v1, got {url!r}")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _checked_key(api_key: str) -> str:
    """Return a key that can stand in a header."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise ChatError("--api-key must be printable ASCII")
    return api_key


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body, cut at the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            break
    return bytes(body[:MAX_BODY_BYTES])


def _run(task: Coroutine[Any, Any, T]) -> T:
    """Run to the end. Ctrl-C cancels the task, which closes its connection, and raises KeyboardInterrupt."""
    return asyncio.run(task)
