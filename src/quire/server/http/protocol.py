"""HTTP/1.1 protocol: uvicorn's, with limits on sizes and times, and bounds on the work of one loop iteration.

The parser reports a header when it is complete; the bytes that it holds until then are counted to within one read. A
refused connection is read for a moment longer (`quire.server.http.sockets`).

A client that closes its side of a connection counts as disconnected, since nothing else reveals it: asyncio closes the
other side too, and a half-closed connection gets no response.

libuv handles all ready connections in one iteration, up to 49,152: 8,000 clients that disconnect at once, some 20 us
each, are a pause of 0.15 s. So the event loop watches a few connections itself, and each further one only while it is
admitted: until then it waits in an epoll set, where the loop sees a single ready file and admits READS_PER_ITERATION
connections to the next iteration, in the order of their events. With TLS every connection is watched by the event loop:
its transport has no way to stop reading from the socket.

Starting a request, and notifying one of a disconnect, take up to a millisecond until its task waits: MAX_PER_ITERATION
of these calls are made in an iteration, and the others in later ones.
"""

import asyncio
import fcntl
import select
import termios
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from quire.server.errors import ApiError, too_many_connections
from quire.server.http.application import IS_RECEIVED
from quire.server.http.sockets import LingeringConnections, max_connections
from quire.server.limits.active_responses import DISCONNECT, Disconnect
from quire.server.options import Limits

MAX_PER_ITERATION = 4  # some 4 ms on 2 cores of an AMD EPYC (Zen 4)


class PacedCalls:
    """First in, first out. A call is made at once while the current iteration has made fewer than the limit."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = deque[Callable[[], None]]()
        self._num_left = MAX_PER_ITERATION  # calls that the current iteration may still make
        self._is_scheduled = False

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return len(self._waiting)

    def add(self, call: Callable[[], None]) -> None:
        """Make a call now or in a later iteration, after all calls added before it."""
        self._waiting.append(call)
        self._make_some()

    def _make_some(self) -> None:
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._num_left, self._is_scheduled = MAX_PER_ITERATION, False
        if self._waiting:
            self._make_some()


MAX_DIRECT = 64            # connections watched by the event loop: without a burst, a read costs nothing more
READS_PER_ITERATION = 16   # some 2 ms if each is a request, on 2 cores of an AMD EPYC (Zen 4)


class ReadGate:
    """The admission of one server's connections to reading. Lives on its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._waiting = dict[int, "GatedFlow"]()  # keys are file descriptors
        self._num_direct = 0
        self._loop.add_reader(self._epoll.fileno(), self._admit)

    def close(self) -> None:
        """Stop admitting."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def enter(self) -> bool:
        """Return whether the event loop may watch one more connection, which then must `leave`."""
        if self._num_direct >= MAX_DIRECT:
            return False
        self._num_direct += 1
        return True

    def leave(self) -> None:
        """Free the place of a connection that the event loop watched."""
        self._num_direct -= 1

    def add(self, file: int, flow: "GatedFlow") -> None:
        """Watch a connection, without admitting it yet."""
        self._waiting[file] = flow
        self._epoll.register(file, select.EPOLLONESHOT)

    def remove(self, file: int) -> None:
        """Forget a connection. Its file must still be open."""
        del self._waiting[file]
        self._epoll.unregister(file)

    def await_read(self, file: int) -> None:
        """Admit a connection once, when it has something to read."""
        self._epoll.modify(file, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)

    def _admit(self) -> None:
        for file, _ in self._epoll.poll(0, READS_PER_ITERATION):
            self._waiting[file].admit()


class GatedFlow(FlowControl):
    """Flow control of one connection. Reading is paused by uvicorn, or until the gate admits the connection."""

    def __init__(self, transport: asyncio.Transport, gate: ReadGate) -> None:
        super().__init__(transport)
        self._gate = gate
        self._file: int | None = None  # member of the gate's set
        self._is_direct = gate.enter()
        if not self._is_direct and not is_ssl(transport):
            self._file = transport.get_extra_info("socket").fileno()
            gate.add(self._file, self)
            asyncio.get_running_loop().call_soon(self.finish_read)  # uvloop starts reading before that

    def admit(self) -> None:
        """Read in the next iteration of the event loop."""
        if not self.read_paused:
            self._transport.resume_reading()

    def finish_read(self) -> None:
        """End an admission, after the data of a read were handled."""
        if self._file is None:
            return
        if self._gate.enter():
            self._gate.remove(self._file)
            self._file, self._is_direct = None, True
        elif not self.read_paused:
            self._transport.pause_reading()
            self._gate.await_read(self._file)

    def resume_reading(self) -> None:
        """Continue reading, from the next admission on if the connection is gated."""
        if self._file is None:
            super().resume_reading()
        elif self.read_paused:
            self.read_paused = False
            self._gate.await_read(self._file)

    def close(self) -> None:
        """Leave the gate. The connection's file must still be open."""
        if self._file is not None:
            self._gate.remove(self._file)
            self._file = None
        elif self._is_direct:
            self._gate.leave()


_VERSIONS = frozenset({"1.0", "1.1"})

Part = Literal["head", "body", "upgrade"]  # upgrade: the head of a request that is parsed again as a plain one


class _UnknownLength(int):
    """Length of a body that the end of the connection delimits: uvicorn's comparisons find no mismatch."""

    def __lt__(self, num_bytes: int) -> bool:
        return False

    def __sub__(self, num_bytes: int) -> "_UnknownLength":
        return self

    def __ne__(self, num_bytes: object) -> bool:
        return False


class _Event:
    """`asyncio.Event` without a deque, which an idle connection would hold twice."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiting: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting = [*(self._waiting or ()), future]
            await future


class _Pipeline(list[Any]):
    """Subset of a deque that uvicorn uses; an empty deque takes 624 bytes, and few requests wait on a connection."""

    __slots__ = ()

    def appendleft(self, call: object) -> None:
        self.insert(0, call)

    def popleft(self) -> None:
        del self[0]


@dataclass(slots=True)
class _HeaderSize:
    """Headers of one request so far, trailers included, and what the parser holds of anything."""

    num_headers: int = 0
    num_bytes: int = 0
    num_held_bytes: int = 0     # given to the parser, and not yet reported by it


class Protocol(HttpToolsProtocol):
    """One connection."""

    # Beside a dict with uvicorn's attributes: all connections share its keys, which they would not with more than 30.
    __slots__ = (
        "_answering", "_gate", "_header_size", "_is_refused", "_limits", "_paced",
        "_part", "_pending_error", "_receive_timer", "_refused", "_send_timer",
    )  # fmt: skip

    def __init__(
        self, limits: Limits, refused: LingeringConnections, paced: PacedCalls, gate: ReadGate,
        *args: Any, **kwargs: Any,  # noqa: ANN401 (uvicorn's)
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self._limits, self._refused, self._paced, self._gate = limits, refused, paced, gate
        self._part: Part | None = None                # being received, of an incomplete request
        self._header_size = _HeaderSize()
        self._is_refused = False
        self._answering: RequestResponseCycle | None = None  # the current request; uvicorn's `cycle` is the latest
        self._pending_error: ApiError | None = None      # sent after the responses to all earlier requests
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None  # while a slow client reads

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, unless max_connections is exceeded."""
        super().connection_made(transport)
        self.flow: GatedFlow = GatedFlow(transport, self._gate)
        self.flow._is_writable_event = _Event(is_set=True)  # type: ignore[assignment]
        transport.set_write_buffer_limits(self._limits.max_buffered_bytes)
        self._start_receive_timer()
        limit = max_connections(self._limits.max_connections)
        if len(self.connections) - len(self._refused) > limit:
            self._refuse(too_many_connections(limit))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and notify the current request: uvicorn notifies the latest."""
        self._cancel_receive_timer()
        self.flow.close()
        self._refused.discard(self.transport)
        self.connections.discard(self)
        if self._is_answering:
            self._answering.disconnected = True  # type: ignore[union-attr]
        self._paced.add(partial(self._notify_lost, exc))

    def _notify_lost(self, exc: Exception | None) -> None:
        if self._answering is not None and self._answering.disconnected:
            self._answering.message_event.set()
            self._answering.scope[DISCONNECT].notify()  # type: ignore[literal-required]
        super().connection_lost(exc)  # also resumes writing, without effect

    def pause_writing(self) -> None:
        """Stop writing until a slow client has read."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        """Continue writing."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().resume_writing()

    def shutdown(self) -> None:
        """Close the connection; a running response is cut off."""
        if self._is_answering:
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or refuse the connection."""
        self._parse(data)
        self.flow.finish_read()

    def _parse(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._header_size.num_held_bytes += len(data)
        try:
            self.parser.feed_data(data)
            if self._header_size.num_held_bytes > self._limits.max_header_bytes:
                self._check_header_bytes(self._header_size.num_held_bytes)
        except httptools.HttpParserUpgrade as upgrade:
            head, self.parser = self._plain_head(), httptools.HttpRequestParser(self)
            self._parse(head + data[upgrade.args[0] :])
        except ApiError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            wrong, why = ApiError(400, "this is not a valid HTTP/1.1 request"), error.__context__
            self._refuse(why if isinstance(why, ApiError) else wrong)  # a callback has stopped the parser

    # --- callbacks of the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start the timer of a request."""
        self._part = "head"
        self._header_size.num_headers = self._header_size.num_bytes = 0
        self._start_receive_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Check the URL so far."""
        super().on_url(url)
        self._header_size.num_held_bytes -= len(url)
        if len(self.url) > self._limits.max_url_bytes:
            raise _too_large(f"the URL is longer than {self._limits.max_url_bytes} bytes (max_url_bytes)")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check a header, or count a trailer and drop it."""
        size = self._header_size
        size.num_held_bytes -= len(name) + len(value)
        size.num_bytes += len(name) + len(value)
        size.num_headers += 1
        if size.num_headers > self._limits.max_headers:
            raise _too_large(f"the request has more than {self._limits.max_headers} headers (max_headers)")
        if size.num_bytes > self._limits.max_header_bytes:
            self._check_header_bytes(size.num_bytes)
        if self._part == "head":
            super().on_header(name, value.rstrip(b" \t"))  # RFC 9110, 5.5; httptools 0.9.0 strips only in front

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind earlier requests of the connection.

        An upgrade request is parsed again as a plain one: the parser leaves out its body.
        """
        if self.parser.get_http_version() not in _VERSIONS:  # a request line without one counts as 0.9
            raise ApiError(400, "this is not a valid HTTP/1.1 request")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._part = "upgrade"
            return
        most = self._limits.max_pipelined_requests
        if len(self.pipeline) >= most:
            message = f"more than {most} requests wait on this connection (max_pipelined_requests)"
            raise ApiError(400, message)
        self.scope[DISCONNECT] = Disconnect()  # type: ignore[literal-required]
        super().on_headers_complete()  # raises if the URL is invalid
        self.cycle.message_event = _Event()  # type: ignore[assignment]
        if self.parser.get_http_version() == "1.0":  # no chunked encoding: uvicorn closes the connection at the end
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UnknownLength()
        self.flow.resume_reading()  # also for a queued request: else a disconnect is not detected
        self._part = "body"

    def on_body(self, body: bytes) -> None:
        """Check the body of a queued request."""
        self._header_size.num_held_bytes = 0
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            message = f"more than {HIGH_WATER_LIMIT} bytes of a body wait on this connection behind other requests"
            raise ApiError(413, message, code="request_too_large")

    def on_message_complete(self) -> None:
        """Stop the timer of a complete request."""
        is_upgrade, self._part = self._part == "upgrade", None
        self._header_size.num_held_bytes = 0
        if is_upgrade:
            return
        self._cancel_receive_timer()
        super().on_message_complete()
        self.headers = []       # the scope of the request has them
        self.scope[IS_RECEIVED] = True  # type: ignore[literal-required]
        if self.flow.read_paused:
            self.flow.resume_reading()  # else a disconnect behind a long body is not detected

    def on_response_complete(self) -> None:
        """Start the next request, unless the body of this one may still be coming."""
        is_body_uncertain = self._part == "body" and self.expect_100_continue and not self.pipeline
        super().on_response_complete()
        if is_body_uncertain:
            self.transport.close()
        elif self._pending_error is not None and not self._is_answering:
            self._send_final(self._pending_error)

    # --- upgrades, which are not supported ---------------------------------------------------------------------------

    def _plain_head(self) -> bytes:
        """Return the head that has just been parsed, without its Upgrade header."""
        version = self.parser.get_http_version().encode("ascii")
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([self.parser.get_method() + b" " + self.url + b" HTTP/" + version, *fields, b"", b""])

    # --- limits ---------------------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    @property
    def _num_unread_bytes(self) -> int:
        """Count bytes written that have not reached the client's machine, those in the kernel included."""
        held = array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return held[0] + self.transport.get_write_buffer_size()

    def _check_header_bytes(self, num_bytes: int) -> None:
        most = self._limits.max_header_bytes
        if num_bytes > most:
            raise _too_large(f"the headers take more than {most} bytes (max_header_bytes)")

    def _refuse(self, error: ApiError) -> None:
        """Send an error for a malformed or oversized request, after earlier responses, and close the connection."""
        self._is_refused = True
        self._cancel_receive_timer()
        if self._part == "body" and self.pipeline:
            self.pipeline.popleft()     # never started
        elif self._part == "body":
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.cycle.scope[DISCONNECT].notify()  # type: ignore[literal-required]
            if self.cycle.response_started:
                self.transport.close()
            else:
                self._send_final(error)
            return
        if self._is_answering:
            self._pending_error = error
        else:
            self._send_final(error)

    def _send_final(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(_response(error))
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._refused.add(self.transport)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 (ASGI)
        self._answering = cycle
        self._paced.add(partial(self._start_task, cycle, app))

    def _start_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 (ASGI)
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def _start_receive_timer(self) -> None:
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(self._limits.receive_timeout, self._on_receive_timeout)

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _start_send_timer(self) -> None:
        limit_s = self._limits.send_timeout
        self._send_timer = self.loop.call_later(limit_s, self._on_send_timeout, self._num_unread_bytes)

    def _on_send_timeout(self, num_bytes: int) -> None:
        """Close the connection if the client has read little of the `num_bytes` that waited; its request is aborted."""
        if num_bytes - self._num_unread_bytes >= self._limits.max_buffered_bytes:
            self._start_send_timer()
        else:
            self.transport.abort()

    def _on_receive_timeout(self) -> None:
        """Close a connection without a complete head or body; RequestBody has the timeout of a running request."""
        self._receive_timer = None
        if self._is_answering:
            self._start_receive_timer()
        elif self._part == "head":
            limit_s = self._limits.receive_timeout
            message = f"the headers took more than {limit_s:g} s (receive_timeout)"
            self._refuse(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def _response(error: ApiError) -> bytes:
    """Return a whole response, after which the connection is closed."""
    body = msgspec.json.encode(error.body)
    headers = error.headers | {
        "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode("ascii") + b"\r\n" + body
