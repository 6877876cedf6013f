"""Bounds on what many connections make a server do in one iteration of the event loop, before any stream continues.

libuv handles all ready connections in one iteration, up to 49,152: 8,000 clients that disconnect at once, some 20 us
each, are a pause of 0.15 s. So the event loop watches a few connections itself, and each further one only while it is
admitted: until then it waits in an epoll set, where the loop sees a single ready file and admits READS_PER_ITERATION
connections to the next iteration, in the order of their events. With TLS every connection is watched by the event loop:
its transport has no way to stop reading from the socket.

Starting a request, and notifying one of a disconnect, take up to a millisecond until its task waits: MAX_PER_ITERATION
of these calls are made in an iteration, and the others in later ones.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import is_ssl

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
