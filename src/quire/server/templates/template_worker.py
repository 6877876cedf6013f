"""The template process: `python -m quire.server.templates.template_worker FD`, which the renderer starts.

A chat template is a program of the model's authors, and its input is part of a request. Jinja's sandbox restricts what
it can reach, but neither its run time nor its memory; the limits of a process do (`server/limits/sandbox_worker.py`).
The worker renders one conversation after the other.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from quire.core import logs
from quire.core.errors import InvalidRequestError
from quire.core.frames import frame
from quire.server.limits.sandbox_worker import serve_jobs
from quire.text.chat_template import ChatTemplate
from quire.text.fitted_messages import WriteCalls
from quire.text.image_marks import ImageMarks
from quire.text.template_forms import TemplateForms
from quire.text.tools import DEFAULT_TOOL_LIMITS, ToolLimits, parameters_of

RENDER_LIMIT_S = 2.0        # a page of chat takes 0.1 ms, 4 MiB of messages about 100 ms


class LoadTemplate(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message: the sources of the templates by their names, and the forms that an earlier probe found."""

    sources: dict[str, str]
    forms: dict[str, TemplateForms] | None = None


class ProbeTemplate(msgspec.Struct, tag="probe", array_like=True, frozen=True):
    """A request for the forms that the templates read. `tokens`: special tokens by their names."""

    tokens: dict[str, str]


class Render(msgspec.Struct, tag="render", array_like=True, frozen=True):
    """A conversation and tools, unchecked, and the other variables of the template.

    `forced`: indices of the tools with schemas that become grammars, which is checked. `call_format`: name of the
    format in which calls are written where the template shows none; None: the one that is recognized. `marks`: of the
    images; None for a model that reads text alone.
    """

    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: Any = None
    limits: ToolLimits = DEFAULT_TOOL_LIMITS
    forced: list[int] = []
    call_format: str | None = None
    marks: ImageMarks | None = None


class TemplateLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The answer to `LoadTemplate`."""


class TemplateProbed(msgspec.Struct, tag="probed", array_like=True, frozen=True):
    """The answer to `ProbeTemplate`: forms by the names of the templates."""

    forms: dict[str, TemplateForms]


class Rendered(msgspec.Struct, tag="rendered", array_like=True, frozen=True):
    """The text of a conversation."""

    text: str


class RenderRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """An InvalidRequestError."""

    message: str
    param: str | None
    code: str | None


TemplateCommand = LoadTemplate | ProbeTemplate | Render
TemplateReply = TemplateLoaded | TemplateProbed | Rendered | RenderRefused

decode_command: Callable[[bytes], TemplateCommand] = msgspec.msgpack.Decoder(TemplateCommand).decode
decode_reply: Callable[[bytes], TemplateReply] = msgspec.msgpack.Decoder(TemplateReply).decode


class TemplateJobs:
    """The template, once it is loaded, and the answers to commands."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def answer(self, body: bytes) -> bytes:
        """Return the frame of the reply to a command. MemoryError when memory runs out."""
        command = decode_command(body)
        if isinstance(command, LoadTemplate):
            self._template = ChatTemplate(command.sources, forms=command.forms)  # compiled by its first render
            return frame(TemplateLoaded())
        assert self._template is not None, "the first command must be LoadTemplate"
        if isinstance(command, ProbeTemplate):
            self._template = ChatTemplate(self._template.sources, tokens=command.tokens)
            return frame(TemplateProbed(dict(self._template.forms)))
        return _rendered(self._template, command)


def _rendered(template: ChatTemplate, command: Render) -> bytes:
    """Return the frame of a conversation's text, or of a refusal."""
    try:
        text = template.render(
            command.messages,
            tools=command.tools,
            limits=command.limits,
            write_calls=_writer(command.call_format),
            add_generation_prompt=command.add_generation_prompt,
            continue_final_message=command.continue_final_message,
            marks=command.marks,
            **command.variables,
        )
        if command.forced:
            from quire.grammar_writing.writer import check_tool_schemas  # noqa: PLC0415 (for forced tools alone)

            check_tool_schemas([parameters_of(tool) for tool in command.tools], command.forced)
        return frame(Rendered(text))
    except InvalidRequestError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error
        return _refusal(str(error), error.param, error.code)
    except UnicodeEncodeError:
        return _refusal("the chat template has rendered half a surrogate pair", "messages", None)


def _writer(call_format: str | None) -> WriteCalls | None:
    """Return a function that writes calls in the format of this name."""
    if call_format is None:
        return None
    from quire.text.tool_formats.writing import call_writer  # noqa: PLC0415 (10 ms, for such calls alone)

    return call_writer(call_format)


def _refusal(message: str, param: str | None, code: str | None) -> bytes:
    """Return the frame of a refusal; its text may be invalid Unicode written by a template."""
    return frame(RenderRefused(message.encode(errors="replace").decode(), param, code))


if __name__ == "__main__":
    logs.set_up("templates", logging.WARNING)  # the server logs the same
    serve_jobs(TemplateJobs().answer, RENDER_LIMIT_S)
