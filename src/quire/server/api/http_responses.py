"""HTTP responses of a generation: one JSON body, or server-sent events; long values are encoded in slices.

Status and headers of a stream are sent when its requests have been queued: every refusal has happened by then, and
clients with a timeout see the connection alive. A later error is the stream's last event.

While a stream is idle it gets comments, so that no proxy closes it: a request may wait, be prefilled or be preempted
for longer than the idle timeout of a load balancer. Clients of server-sent events ignore comments.

A message is encoded with a placeholder for each `JsonStream`: a byte that JSON cannot contain otherwise.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import EngineError
from quire.core.outputs import RequestOutput
from quire.server.api.generation import Generation, TokenUsage, total_usage
from quire.server.errors import ApiError
from quire.server.http.application import release_request
from quire.server.limits.active_responses import ClientDisconnectedError
from quire.server.limits.fair_semaphore import MAX_SLICE_BYTES, MAX_SLICE_UNITS
from quire.server.service import Service

encode = msgspec.json.Encoder().encode
_SLICE_BYTES = 1024  # a longer piece was a slice of work, whatever its length
_PLACEHOLDER = b"\x00"  # inside a string it would be escaped


class JsonStream:  # no dataclass: msgspec would encode one by itself
    """A value of a message that is encoded piece by piece, once."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces


class _PiecesFoundError(Exception):
    """A message has a JsonStream in it."""


def _refuse_pieces(value: object) -> NoReturn:
    if isinstance(value, JsonStream):
        raise _PiecesFoundError
    raise NotImplementedError(f"{type(value).__name__} has no JSON")


_encode_whole = msgspec.json.Encoder(enc_hook=_refuse_pieces).encode


def encode_streamed(message: Any) -> Iterable[bytes]:  # noqa: ANN401 (JSON)
    """Return the JSON of a message that may have `JsonStream` in it."""
    try:
        return (_encode_whole(message),)
    except _PiecesFoundError:
        return _encode_around(message)


def _encode_around(message: Any) -> Iterator[bytes]:  # noqa: ANN401 (JSON)
    found: list[JsonStream] = []

    def placeholder_of(value: object) -> msgspec.Raw:
        assert isinstance(value, JsonStream), "anything else was refused"
        found.append(value)
        return msgspec.Raw(_PLACEHOLDER)

    head, *tails = msgspec.json.encode(message, enc_hook=placeholder_of).split(_PLACEHOLDER)
    yield head
    for value, tail in zip(found, tails, strict=True):
        yield from value.pieces
        yield tail


def array(slices: Iterable[bytes | Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of an array from slices of it: arrays that are not empty, or the pieces of one long element."""
    yield b"["
    between = b""
    for each in slices:
        if isinstance(each, bytes):
            yield between + each[1:-1]
        else:
            yield between
            yield from each
        between = b","
    yield b"]"


def array_from_values(values: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of an array from that of its values."""
    yield b"["
    between = b""
    for value in values:
        yield between
        yield from value
        between = b","
    yield b"]"


def joined(pieces: Iterable[bytes], least_bytes: int) -> Iterator[bytes]:
    """Yield the same bytes in slices of bounded work: at least `least_bytes`, or two pieces of a long value.

    An empty piece stands for a slice of work that has written nothing yet. A slice may be empty then.
    """
    held: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        held.append(piece)
        is_slice = not piece or len(piece) >= _SLICE_BYTES
        num_bytes += max(len(piece), least_bytes // 2) if is_slice else len(piece)
        if num_bytes >= least_bytes:
            yield b"".join(held)
            held, num_bytes = [], 0
    if any(held):
        yield b"".join(held)


KEEPALIVE = b": keepalive\n\n"
log = logging.getLogger(__name__)


class ResponseBuilder(Protocol):
    """Builds the response to one API request: either `response`, or chunks of a stream, in slices of bounded work."""

    @property
    def streams(self) -> bool:
        """True if the client asked for a stream."""

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the whole response, from the last output of each prompt."""

    def first_chunk(self) -> bytes:
        """Return the beginning of a stream, sent before there is an output."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield the events for the new part of an output; nothing if there is nothing to show."""

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output, in units of `MAX_SLICE_UNITS`."""

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Return the end of a stream."""

    def error_chunk(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""


class Keepalive:
    """Calls `send` whenever nothing was written for `interval_s`, never within an event; 0: never."""

    def __init__(self, interval_s: float, send: Callable[[], Awaitable[None]]) -> None:
        self._interval_s, self._send = interval_s, send
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()                  # when the last event was written
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._arm(self._interval_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def write(self, event: Awaitable[None]) -> None:
        """Await the writing of an event; no comment and no other event is written between its pieces."""
        async with self._writing:
            await event
            self._last_s = self._loop.time()

    def _arm(self, delay_s: float) -> None:
        if self._interval_s:
            self._timer = self._loop.call_later(delay_s, self._send_if_idle)

    def _send_if_idle(self) -> None:
        """Send a comment, unless an event was written meanwhile or is being written."""
        due_s = self._last_s + self._interval_s - self._loop.time()
        if due_s <= 0 and not self._writing.locked():
            self._sending = self._loop.create_task(self._send_comment())
        self._arm(due_s if due_s > 0 else self._interval_s)

    async def _send_comment(self) -> None:
        await self.write(self._send())


async def create_response(
    request: Request, service: Service, generation: Generation, builder: ResponseBuilder,
    headers: Mapping[str, str] | None = None,
) -> Response:  # fmt: skip
    """Return the response: after the last output, or at once as a stream, with further `headers`.

    Raises EngineDeadError, ApiError or ClientDisconnectedError if a response in one body cannot be completed.
    """
    release_request(request)
    if builder.streams:
        return EventStream(service, generation, builder, headers)
    is_long = False
    try:
        outputs = await service.responses.run(generation.last_outputs(), request.scope, request.receive)
        is_long = sum(map(builder.weight, range(len(outputs)), outputs)) > MAX_SLICE_UNITS
    finally:
        usage = generation.finish()
        if not is_long:
            generation.release()
    pieces = builder.response(outputs, usage)
    if is_long:
        return LongResponse(service, generation, pieces, headers)
    return json_response(b"".join(pieces), headers)


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; bytes are JSON already."""
    return Response(body if isinstance(body, bytes) else encode(body), 200, headers, "application/json")


class LongResponse(Response):
    """A JSON response that is encoded and sent in slices, no faster than the client reads."""

    def __init__(
        self, service: Service, generation: Generation | None, pieces: Iterable[bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "application/json", **(headers or {})})
        self._service, self._generation, self._pieces = service, generation, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, unless the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._service.responses.run(self._send_pieces(send), scope, receive)
        except (ClientDisconnectedError, OSError):
            log.debug("the client disconnected before the end of a response")
        finally:
            if self._generation is not None:
                self._generation.release()

    async def _send_pieces(self, send: Send) -> None:
        async for piece in self._service.slices.iterate(joined(self._pieces, MAX_SLICE_BYTES)):
            if piece:
                await send(_body(piece))
        await send(_body(b"", more_body=False))


class EventStream(Response):
    """A stream of server-sent events: one send per output that has something to show, and no task per output."""

    def __init__(
        self, service: Service, generation: Generation, builder: ResponseBuilder, headers: Mapping[str, str] | None
    ) -> None:
        self.status_code, self.background = 200, None  # the base's constructor would announce an empty body
        self.init_headers({
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would buffer the events
            **(headers or {}),
        })
        self._service, self._generation, self._builder = service, generation, builder
        self._is_within_event = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. An error is its last event."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._service.responses.run(self._send_events(send), scope, receive)
        except (ClientDisconnectedError, OSError):
            log.debug("the client disconnected before the end of a stream")
        except Exception as error:
            if not isinstance(error, ApiError | EngineError):
                log.exception("a stream failed")
            cut = b"\n\n" if self._is_within_event else b""
            last = cut + self._builder.error_chunk(self._service.to_api_error(error))
            await send(_body(last, more_body=False))
        finally:
            self._generation.finish()
            self._generation.release()

    async def _send_events(self, send: Send) -> None:
        if first := self._builder.first_chunk():
            await send(_body(first))
        async with Keepalive(self._service.options.stream_keepalive, lambda: send(_body(KEEPALIVE))) as keepalive:

            async def send_output(prompt_index: int, output: RequestOutput) -> None:
                await keepalive.write(self._send_output(send, prompt_index, output))

            await self._generation.send_all(send_output)
        last = self._builder.last_chunk(total_usage(self._generation.usage))
        await send(_body(last, more_body=False))

    async def _send_output(self, send: Send, prompt_index: int, output: RequestOutput) -> None:
        is_long = self._builder.weight(prompt_index, output) > MAX_SLICE_UNITS
        chunks = self._builder.chunks(prompt_index, output)
        if not is_long:
            if written := b"".join(chunks):
                await send(_body(written))
            return
        self._is_within_event = True
        async for piece in self._service.slices.iterate(joined(chunks, MAX_SLICE_BYTES)):
            if piece:
                await send(_body(piece))
        self._is_within_event = False


def _body(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
