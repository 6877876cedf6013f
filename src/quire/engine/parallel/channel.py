"""Channel between two ranks: frames in both directions over a stream socket, and heartbeats of the process behind it.

A frame without content is a heartbeat: it says that the process runs, whatever its other threads do. A thread reads, so
that heartbeats are counted while the caller computes, and the end of the stream is noticed at once.
"""

import hmac
import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from quire.core.frames import LENGTH_BYTES, frame, has_room, read_frame

BEAT_INTERVAL_S = 0.25
OFFER_WAIT_S = 1.0      # for what another thread sends: a heartbeat, in the middle of which a busy machine stops it
CODE_BYTES = 32
MAX_FRAME_BYTES = (1 << 8 * LENGTH_BYTES) - 1


class FrameSeal:
    """Authentication of what is sent over a channel, in one direction and in order.

    Each frame carries a code (HMAC-SHA-256, RFC 2104) of its number and its content.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def close(self, content: bytes) -> bytes:
        """Return the next content with its code before it."""
        return self._code(content) + content

    def open(self, sealed: bytes) -> bytes:
        """Return the next content. ConnectionError if its code is wrong."""
        content = sealed[CODE_BYTES:]
        if not hmac.compare_digest(sealed[:CODE_BYTES], self._code(content)):
            raise ConnectionError("a frame with a wrong code")
        return content

    def _code(self, content: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + content, "sha256")


class Channel:
    """One end. `decode` makes messages of what is read; `seals`: of what is sent and of what is read, on a network.

    `most_bytes`: of a frame that is read; a longer one ends the stream.
    """

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], Any],
        seals: tuple[FrameSeal, FrameSeal] | None = None,
        most_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._socket, self._decode, self._seals, self._most_bytes = connection, decode, seals, most_bytes
        self._sending = threading.Lock()
        self._received = SimpleQueue[Any]()
        self._was_heard, self._num_silent_looks = True, 0
        self.silence_limit_s = math.inf

    def is_silent(self) -> bool:
        """Return whether nothing was heard of the other end for longer than the limit; asked every BEAT_INTERVAL_S.

        Looks are counted, not time: a process that was stopped, perhaps with all others of the machine, has missed
        looks, and has not read yet what was sent meanwhile.
        """
        was_heard, self._was_heard = self._was_heard, False
        self._num_silent_looks = 0 if was_heard else self._num_silent_looks + 1
        return self._num_silent_looks * BEAT_INTERVAL_S > self.silence_limit_s

    def start(
        self, on_end: Callable[[], None] = lambda: None, handles: Callable[[Any], bool] = lambda message: False
    ) -> None:
        """Start to read. The thread that reads calls `on_end` at the end of the stream.

        A message for which `handles`, called by that thread, returns True is not received.
        """
        threading.Thread(target=self._read, args=(on_end, handles), name="channel", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. OSError if the other end has closed."""
        content = frame(message)
        with self._sending:
            self._socket.sendall(self._sealed(content))

    def beat(self) -> None:
        """Send a heartbeat, unless it would have to wait: then something has just been sent, or is not read."""
        self._offer(bytes(LENGTH_BYTES), 0.0)

    def offer(self, message: msgspec.Struct, wait_s: float = OFFER_WAIT_S) -> None:
        """Send a message, unless the other end does not read, or has closed.

        Another thread that is sending has `wait_s` to finish.
        """
        self._offer(frame(message), wait_s)

    def receive(self) -> Any:  # noqa: ANN401 (what `decode` returns)
        """Wait for the next message. EOFError if the stream has ended."""
        message = self._received.get()
        if message is None:
            self._received.put(None)
            raise EOFError("the other end has closed the channel")
        return message

    def close(self) -> None:
        """End the stream in both directions. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _offer(self, content: bytes, wait_s: float) -> None:
        if self._sending.acquire(timeout=wait_s):
            with suppress(OSError, ValueError):  # the thread that reads finds the end
                if has_room(self._socket):
                    self._socket.sendall(self._sealed(content))
            self._sending.release()

    def _sealed(self, content: bytes) -> bytes:
        if self._seals is None:
            return content
        sealed = self._seals[0].close(content[LENGTH_BYTES:])
        return len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed

    def _read(self, on_end: Callable[[], None], handles: Callable[[Any], bool]) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while (content := read_frame(stream, self._most_bytes)) is not None:
                    if self._seals is not None:
                        content = self._seals[1].open(content)
                    self._was_heard = True
                    if content and not handles(message := self._decode(content)):
                        self._received.put(message)
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # closed here, or what was read makes no sense: `on_end` tells
        finally:
            self._received.put(None)
            on_end()
