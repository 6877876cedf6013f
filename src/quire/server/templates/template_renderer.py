"""Chat template renderer: runs templates, which are untrusted programs, in a process with limits.

A template is probed once, by the first process; each process after it is told what the probe found.

A process renders one conversation after the other, a tenth of a millisecond each. A conversation past the limits kills
the process: its request is refused, and the next one gets a new process. If the process dies otherwise, the cause may
not be the template: the request fails with 500.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.core.errors import InvalidRequestError
from quire.core.frames import frame
from quire.server.errors import overloaded
from quire.server.limits.sandbox import JobLimitError, SandboxEndedError, SandboxKind, SandboxLane
from quire.server.options import DEFAULT_LIMITS, Limits
from quire.server.templates import template_worker as worker
from quire.server.templates.template_worker import (
    LoadTemplate,
    ProbeTemplate,
    Render,
    Rendered,
    RenderRefused,
    TemplateProbed,
)
from quire.text.chat_template import MAX_RENDERED_CHARS, log_forms
from quire.text.conversation import Message
from quire.text.image_marks import ImageMarks
from quire.text.template_forms import TemplateForms
from quire.text.text_settings import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from quire.text.tokenizer import Tokenizer
from quire.text.tools import Tool, ToolLimits

log = logging.getLogger(__name__)

SHORT_BYTES = 32 << 10                      # 10 ms at worst; a page of chat has 4 KiB
TEMPLATES = SandboxKind(
    "template", worker.__name__, worker.RENDER_LIMIT_S, max_reply_bytes=5 * MAX_RENDERED_CHARS
)  # fmt: skip

_UNSENDABLE = (OverflowError, TypeError, UnicodeEncodeError, RecursionError)
_CANNOT_ENFORCE = "the schemas of tools cannot be compiled, and the messages rendered,"
_CANNOT_RENDER = "the model's chat template cannot render the messages"


class TemplateRenderer:
    """Renders conversations off the event loop. Lives on one event loop; `close` it there.

    Long conversations have a process of their own, so that short ones never wait for them. Within a lane clients get
    slots in rotation.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, max_waiting: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._templates = {} if tokenizer is None else dict(tokenizer.chat_templates)
        self._forms: dict[str, TemplateForms] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._short, self._long = (SandboxLane(TEMPLATES, name, self._start) for name in ("template", "template long"))

    def warm_up(self) -> None:
        """Start the process and its probe before the first render, which would wait for them. Takes 1 to 2 ms."""
        if self._templates:
            self._short.warm_up()
            self._probed()

    @property
    def tells_format(self) -> bool:
        """True if tools are described with the format of calls, since the template shows neither."""
        forms = self._forms or {}
        used = forms.get(TOOL_TEMPLATE) or forms.get(DEFAULT_TEMPLATE)
        return used is not None and used.tells_format

    async def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        forced: Sequence[Tool] = (),
        limits: Limits = DEFAULT_LIMITS,
        client_id: str = "",
        call_format: str | None = None,
        marks: ImageMarks | None = None,
    ) -> str:
        """Return the text of a conversation. InvalidRequestError for errors of the messages or the template.

        Calls that the template does not show are written in `call_format`, by default the recognized one. The schemas
        of `forced`, some of the tools, are checked: a grammar must be able to express them. With `marks` messages may
        have images, which have their marks in the text. ApiError 429 when too many
        conversations wait, 503 when closed; RuntimeError when the process was killed or crashed. Cancelling the caller
        kills its render.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: chat needs one", param="messages")
        if not self._templates:
            raise InvalidRequestError("the model has no chat template", param="messages")
        most = limits.max_template_variable_bytes
        name = "max_template_variable_bytes"
        _check_encoded("chat_template_kwargs", "template variables", variables or {}, most, name)
        known = {**self._tokenizer.named_tokens, **(variables or {})}
        _check_encoded("tools", "tools", tools or (), limits.max_tool_bytes, "max_tool_bytes")
        bounds = ToolLimits(
            limits.max_schema_bytes, limits.max_schema_depth, limits.max_schema_properties, limits.max_argument_bytes
        )
        indices = [index for index, tool in enumerate(tools or ()) if any(tool is other for other in forced)]
        command = _frame(Render(
            messages, add_generation_prompt, continue_final_message, known, tools, bounds, indices, call_format, marks
        ))  # fmt: skip
        most = limits.max_conversation_bytes
        _check_bytes("messages", "a conversation", len(command), most, "max_conversation_bytes")
        if self._num_waiting >= self._max_waiting:
            raise overloaded(self._num_waiting, self._max_waiting, retry_after_s=1)
        self._num_waiting += 1
        is_short = len(command) <= SHORT_BYTES and not indices  # grammars may take long however short they are
        lane = self._short if is_short else self._long
        try:
            await asyncio.shield(self._probed())
            async with lane.semaphore.slot(client_id):
                reply = worker.decode_reply(await lane.ask(command))
        except JobLimitError as error:
            what, param = (_CANNOT_ENFORCE, "tools") if indices else (_CANNOT_RENDER, "messages")
            raise InvalidRequestError(f"{what} {error}", param=param) from error
        except SandboxEndedError as error:
            if not indices or error.status != -signal.SIGABRT:
                raise
            raise InvalidRequestError(f"{_CANNOT_ENFORCE} within the limit on memory", param="tools") from error
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
        if self._probing is not None:
            await asyncio.wait((self._probing,))

    def _start(self) -> bytes:
        """Return the first frame of a process."""
        assert self._templates, "a conversation is rendered by a template"
        return _frame(LoadTemplate(self._templates, self._forms))

    def _probed(self) -> "asyncio.Task[None]":
        """Return the task of the probe: started by the first call, and again after a failure."""
        if self._probing is None or (self._probing.done() and self._forms is None):
            self._probing = asyncio.create_task(self._probe(), name="probe of the chat template")
            self._probing.add_done_callback(lambda task: task.cancelled() or task.exception())  # a render raises it
        return self._probing

    async def _probe(self) -> None:
        """Find the forms that the templates read, and log them; one that exceeds the limits gets the defaults."""
        assert self._tokenizer is not None, "a template comes with a tokenizer"
        command = _frame(ProbeTemplate(dict(self._tokenizer.named_tokens)))
        try:
            async with self._short.semaphore.slot(""):
                reply = worker.decode_reply(await self._short.ask(command))
        except JobLimitError as error:
            self._forms = dict.fromkeys(self._templates, TemplateForms())
            log.warning("the chat template cannot be probed %s; it gets messages as they are", error)
            return
        assert isinstance(reply, TemplateProbed), f"expected forms, got {reply}"
        self._forms = reply.forms
        log_forms(self._forms)


def _frame(message: worker.TemplateCommand) -> bytes:
    """Return a message as a frame. InvalidRequestError for values that msgpack cannot encode."""
    try:
        return frame(message)
    except _UNSENDABLE as error:
        raise InvalidRequestError(f"{_CANNOT_RENDER}: {error}", param="messages") from error


def _check_encoded(param: str, what: str, value: Mapping[str, Any] | Sequence[Any], limit: int, flag: str) -> None:
    """Raise InvalidRequestError for a value that cannot be encoded, or has more bytes than the limit."""
    try:
        num_bytes = len(msgspec.msgpack.encode(value)) if value else 0
    except _UNSENDABLE as error:
        raise InvalidRequestError(f"{_CANNOT_RENDER}: {error}", param=param) from error
    _check_bytes(param, what, num_bytes, limit, flag)


def _check_bytes(param: str, what: str, num_bytes: int, limit: int, flag: str) -> None:
    if num_bytes > limit:
        raise InvalidRequestError(f"{what} may have at most {limit} bytes ({flag}), got {num_bytes}", param=param)
