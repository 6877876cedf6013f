"""Renders chat templates in a process of their own, with limits: a template is a program from outside.

One process renders one conversation after the other, a tenth of a millisecond each. One that it cannot do within its
limits costs it its life: that request is refused, and the next one gets a new process. Where it dies of something else,
nobody can tell whether the template is to blame: that request fails, as with any fault of ours (500).
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.errors import InvalidRequestError
from quire.core.frames import LENGTH_BYTES, frame
from quire.engine.child import our_signals_blocked
from quire.server.errors import overloaded, shutting_down
from quire.text.chat_template import MAX_RENDERED_CHARS, Message
from quire.text.template_worker import (
    MEMORY_LIMIT_BYTES,
    OUT_OF_MEMORY,
    RENDER_LIMIT_S,
    Ready,
    Refused,
    Render,
    Rendered,
    Reply,
    Start,
    decode_reply,
)
from quire.text.tokenizer import Tokenizer

START_LIMIT_S = 60.0                        # it takes a seventh of a second
REPLY_LIMIT_S = 5 * RENDER_LIMIT_S          # should a process not end itself: it was stopped, or does not want to
MAX_REPLY_BYTES = 5 * MAX_RENDERED_CHARS    # a character has up to four bytes

_CANNOT_RENDER = "the model's chat template cannot render the messages"


class TemplateRenderer:
    """Conversations to text, off the event loop. Lives on one event loop; `close` it there."""

    def __init__(self, tokenizer: Tokenizer | None, *, max_waiting: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._template = None if tokenizer is None else tokenizer.chat_template
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._process: _TemplateProcess | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False

    def warm_up(self) -> None:
        """Start the process ahead of the first render, which else waits for it. Takes a millisecond or two."""
        if self._template is not None and self._process is None and not self._is_closed:
            self._process = _TemplateProcess()

    async def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation. InvalidRequestError for what the messages or the template get wrong.

        ApiError 429 when too many wait already, 503 when closed; RuntimeError when the process was killed or has
        crashed. A caller that is cancelled ends its render.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: chat needs one", param="messages")
        if self._template is None:
            raise InvalidRequestError("the model has no chat template", param="messages")
        start = Start(self._template, dict(self._tokenizer.named_tokens))
        command = _frame(Render(messages, add_generation_prompt, continue_final_message, dict(variables or {})))
        if self._num_waiting >= self._max_waiting:
            raise overloaded(self._num_waiting, self._max_waiting, retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._turn:
                reply = await self._ask(start, command)
        finally:
            self._num_waiting -= 1
        if isinstance(reply, Refused):
            raise InvalidRequestError(reply.message, param=reply.param, code=reply.code)
        assert isinstance(reply, Rendered), f"expected a text, got {reply}"
        return reply.text

    async def close(self) -> None:
        """End the process. Whoever still waits is told that the server shuts down. Twice is fine."""
        self._is_closed = True
        await self._end_process()

    async def _ask(self, start: Start, command: bytes) -> Reply:
        process = await self._ready_process(start)
        try:
            async with asyncio.timeout(REPLY_LIMIT_S):
                return await process.ask(command)
        except (EOFError, OSError, msgspec.MsgspecError) as error:  # a timeout is an OSError
            status = await self._end_process()
            if self._is_closed:
                raise shutting_down() from error
            raise _failure(status) from error
        except BaseException:  # nobody wants the reply any more
            await self._end_process()
            raise

    async def _ready_process(self, start: Start) -> "_TemplateProcess":
        """Return a process that waits for a conversation: the one we have, if it still lives, or a new one."""
        if self._process is not None and not self._process.is_alive:
            await self._end_process()
        if self._is_closed:
            raise shutting_down()
        process = self._process = self._process or _TemplateProcess()
        if process.is_connected:
            return process
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await process.connect(_frame(start))
        except (EOFError, OSError) as error:
            status = await self._end_process()
            if self._is_closed:
                raise shutting_down() from error
            raise RuntimeError(f"the template process did not start ({_told(status)})") from error
        except BaseException:
            await self._end_process()
            raise
        return process

    async def _end_process(self) -> int:
        """End the process, if there is one, and return its exit status."""
        process, self._process = self._process, None
        return 0 if process is None else await process.end()


class _TemplateProcess:
    """A running `quire.text.template_worker`, and our end of the socket pair."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, our_signals_blocked():
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [sys.executable, "-P", "-m", "quire.text.template_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._opening: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_connected(self) -> bool:
        return self._opening is not None

    async def connect(self, start: bytes) -> None:
        """Hand the template over. EOFError or OSError when the process has ended."""
        opening = asyncio.open_unix_connection(sock=self._socket, limit=MAX_RENDERED_CHARS)
        self._opening = asyncio.create_task(opening)  # quick, but interrupted it would leave the socket to nobody
        reply = await self.ask(start)
        assert isinstance(reply, Ready), f"expected readiness, got {reply}"

    async def ask(self, command: bytes) -> Reply:
        """Send a frame and return the reply. EOFError, OSError or MsgspecError when there is none."""
        assert self._opening is not None, "connect first"
        reader, writer = await asyncio.shield(self._opening)
        writer.write(command)
        await writer.drain()
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > MAX_REPLY_BYTES:
            raise EOFError(f"a reply of {length} bytes is none of ours")
        return decode_reply(await reader.readexactly(length))

    async def end(self) -> int:
        """Kill the process, unless it has ended, and return its exit status."""
        self._process.kill()
        if self._opening is None:
            self._socket.close()
        else:
            self._opening.add_done_callback(_abort)
        return await asyncio.to_thread(self._process.wait)


def _abort(opened: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """Close a connection, without sending what is left to send."""
    _, writer = opened.result()
    writer.transport.abort()


def _frame(message: Start | Render) -> bytes:
    """Return a message ready to be sent. InvalidRequestError for what msgpack cannot hold."""
    try:
        return frame(message)
    except (OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequestError(f"{_CANNOT_RENDER}: {error}", param="messages") from error


def _failure(status: int) -> Exception:
    """Return the error for whoever gave a process its last conversation: a refusal where its own limits ended it."""
    if status == -signal.SIGALRM:
        return InvalidRequestError(f"{_CANNOT_RENDER} within {RENDER_LIMIT_S:g} seconds", param="messages")
    if status == OUT_OF_MEMORY:
        memory = f"{MEMORY_LIMIT_BYTES >> 20} MiB of memory"
        return InvalidRequestError(f"{_CANNOT_RENDER} within {memory}", param="messages")
    return RuntimeError(f"the template process ended in the middle of a conversation ({_told(status)})")


def _told(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
