"""Chat template renderer: runs templates, which are untrusted programs, in a process with limits.

A process renders one conversation after the other, a tenth of a millisecond each. A conversation past the limits kills
the process: its request is refused, and the next one gets a new process. If the process dies otherwise, the cause may
not be the template: the request fails with 500.
"""

import asyncio
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from quire.core.errors import InvalidRequestError
from quire.core.frames import LENGTH_BYTES, frame
from quire.engine.launcher import start_module
from quire.server.errors import overloaded, shutting_down
from quire.server.fair_semaphore import FairSemaphore
from quire.server.options import DEFAULT_LIMITS, Limits
from quire.text import template_worker as worker
from quire.text.chat_template import MAX_RENDERED_CHARS
from quire.text.conversation import Message
from quire.text.template_worker import LoadTemplate, Render, Rendered, RenderRefused, TemplateReply
from quire.text.tokenizer import Tokenizer

START_LIMIT_S = 60.0                        # it takes a seventh of a second
REPLY_LIMIT_S = 5 * worker.RENDER_LIMIT_S   # for a process that is stopped or ignores its limits
SHORT_BYTES = 32 << 10                      # 10 ms at worst; a page of chat has 4 KiB
MAX_REPLY_BYTES = 5 * MAX_RENDERED_CHARS    # a character has up to four bytes

_UNSENDABLE = (OverflowError, TypeError, UnicodeEncodeError, RecursionError)
_CANNOT_RENDER = "the model's chat template cannot render the messages"


class TemplateRenderer:
    """Renders conversations off the event loop. Lives on one event loop; `close` it there.

    Long conversations have a process of their own, so that short ones never wait for them. Within a lane clients get
    slots in rotation.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, max_waiting: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._template = None if tokenizer is None else tokenizer.chat_template
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._short, self._long = _Lane("template"), _Lane("template long")

    def warm_up(self) -> None:
        """Start the process before the first render, which would wait for it otherwise. Takes 1 to 2 ms."""
        if self._template is not None:
            self._short.warm_up()

    async def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        client_id: str = "",
    ) -> str:
        """Return the text of a conversation. InvalidRequestError for errors of the messages or the template.

        ApiError 429 when too many conversations wait, 503 when closed; RuntimeError when the process was killed or
        crashed. Cancelling the caller kills its render.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: chat needs one", param="messages")
        if self._template is None:
            raise InvalidRequestError("the model has no chat template", param="messages")
        _check_variables(variables or {}, limits)
        known = {**self._tokenizer.named_tokens, **(variables or {})}
        command = _frame(Render(messages, add_generation_prompt, continue_final_message, known))
        most = limits.max_conversation_bytes
        _check_bytes("messages", "a conversation", len(command), most, "max_conversation_bytes")
        if self._num_waiting >= self._max_waiting:
            raise overloaded(self._num_waiting, self._max_waiting, retry_after_s=1)
        self._num_waiting += 1
        lane = self._short if len(command) <= SHORT_BYTES else self._long
        try:
            async with lane.semaphore.slot(client_id):
                reply = await lane.ask(LoadTemplate(self._template), command)
        finally:
            self._num_waiting -= 1
        if isinstance(reply, RenderRefused):
            raise InvalidRequestError(reply.message, param=reply.param, code=reply.code)
        assert isinstance(reply, Rendered), f"expected a text, got {reply}"
        return reply.text

    async def close(self) -> None:
        """Kill the processes; waiting renders fail with 503. Idempotent."""
        await self._short.close()
        await self._long.close()


class _Lane:
    """One process at a time, and the semaphore for it."""

    def __init__(self, name: str) -> None:
        self.semaphore = FairSemaphore()
        self.process: _TemplateProcess | None = None
        self._thread = ThreadPoolExecutor(1, name)
        self._is_closed = False

    def warm_up(self) -> None:
        """Start a process if there is none."""
        if self.process is None and not self._is_closed:
            self.process = _TemplateProcess()

    async def ask(self, start: LoadTemplate, command: bytes) -> TemplateReply:
        """Return the reply of the current process, if it is alive, or of a new one."""
        if self.process is not None and not self.process.is_alive:
            await self._stop_process()
        if self._is_closed:
            raise shutting_down()
        process, ask_in_thread = self.process or _TemplateProcess(), asyncio.get_running_loop().run_in_executor
        self.process = process
        try:
            if not process.is_ready:
                await ask_in_thread(self._thread, process.ask, _frame(start), START_LIMIT_S)
                process.is_ready = True
            return await ask_in_thread(self._thread, process.ask, command, REPLY_LIMIT_S)
        except (EOFError, OSError, msgspec.MsgspecError) as error:  # a timeout is an OSError
            status = await self._stop_process()
            if self._is_closed:
                raise shutting_down() from error
            raise _failure(status, is_ready=process.is_ready) from error
        except BaseException:  # cancelled: the reply is not needed
            await self._stop_process()
            raise

    async def close(self) -> None:
        """Kill the process, and start no other."""
        self._is_closed = True
        self._thread.shutdown(wait=False)
        await self._stop_process()

    async def _stop_process(self) -> int:
        """Kill the process, if there is one, and return its exit status."""
        process, self.process = self.process, None
        return 0 if process is None else await process.stop()


class _TemplateProcess:
    """A running `quire.text.template_worker`, and the server's end of the socket pair."""

    def __init__(self) -> None:
        self._process, self._socket = start_module("quire.text.template_worker", stdout=subprocess.DEVNULL)
        self._replies = self._socket.makefile("rb")
        self.is_ready = False       # has the template

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes, limit_s: float) -> TemplateReply:
        """Send a frame and wait for the reply, in a thread. EOFError, OSError or MsgspecError without a valid one."""
        self._socket.settimeout(limit_s)
        self._socket.sendall(message)
        length = int.from_bytes(self._replies.read(LENGTH_BYTES), "big")
        if not 0 < length <= MAX_REPLY_BYTES:
            raise EOFError(f"the template process sent an invalid reply length: {length}")
        return worker.decode_reply(self._replies.read(length))

    async def stop(self) -> int:
        """Kill the process and return its exit status; a concurrent `ask` raises EOFError."""
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._replies.close)  # waits for a concurrent reader
        self._socket.close()
        return status


def _frame(message: LoadTemplate | Render) -> bytes:
    """Return a message as a frame. InvalidRequestError for values that msgpack cannot encode."""
    try:
        return frame(message)
    except _UNSENDABLE as error:
        raise InvalidRequestError(f"{_CANNOT_RENDER}: {error}", param="messages") from error


def _check_variables(variables: Mapping[str, Any], limits: Limits) -> None:
    """Raise InvalidRequestError for template variables that cannot be encoded, or exceed the limit in bytes."""
    try:
        num_bytes = len(msgspec.msgpack.encode(variables)) if variables else 0
    except _UNSENDABLE as error:
        raise InvalidRequestError(f"{_CANNOT_RENDER}: {error}", param="messages") from error
    limit = limits.max_template_variable_bytes
    _check_bytes("chat_template_kwargs", "template variables", num_bytes, limit, "max_template_variable_bytes")


def _check_bytes(param: str, what: str, num_bytes: int, limit: int, flag: str) -> None:
    if num_bytes > limit:
        raise InvalidRequestError(f"{what} may have at most {limit} bytes ({flag}), got {num_bytes}", param=param)


def _failure(status: int, *, is_ready: bool) -> Exception:
    """Return the error of the conversation that a process died of: a refusal if its limits were exceeded."""
    if status == -signal.SIGALRM:
        return InvalidRequestError(f"{_CANNOT_RENDER} within {worker.RENDER_LIMIT_S:g} seconds", param="messages")
    if status == worker.OUT_OF_MEMORY:
        memory = f"{worker.MEMORY_LIMIT_BYTES >> 20} MiB of memory"
        return InvalidRequestError(f"{_CANNOT_RENDER} within {memory}", param="messages")
    cause = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    what = "ended in the middle of a conversation" if is_ready else "did not start"
    return RuntimeError(f"the template process {what} ({cause})")
