"""The template process: `python -m quire.text.template_worker FD`, started by `quire.server.template_renderer`.

A chat template is a program of the model's authors, and its input is part of a request. The sandbox restricts what it
can reach, but neither its run time nor its memory; the limits of a process do. The worker renders one conversation
after the other. The kernel ends it when a render takes too long, also after the server has ended; when memory runs out,
it ends itself. Between renders it ends with its stream.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.errors import InvalidRequestError
from quire.core.frames import frame, read_frame
from quire.text.chat_template import ChatTemplate
from quire.text.tools import DEFAULT_TOOL_LIMITS, ToolLimits

RENDER_LIMIT_S = 2.0        # a page of chat takes 0.1 ms, 4 MiB of messages about 100 ms
MEMORY_LIMIT_BYTES = 1024**3
OUT_OF_MEMORY = 3           # exit status


class LoadTemplate(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message: the template's source."""

    source: str


class Render(msgspec.Struct, tag="render", array_like=True, frozen=True):
    """A conversation and tools, unchecked, and the other variables of the template."""

    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: Any = None
    limits: ToolLimits = DEFAULT_TOOL_LIMITS


class TemplateLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The answer to `LoadTemplate`."""


class Rendered(msgspec.Struct, tag="rendered", array_like=True, frozen=True):
    """The text of a conversation."""

    text: str


class RenderRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """An InvalidRequestError."""

    message: str
    param: str | None
    code: str | None


TemplateCommand = LoadTemplate | Render
TemplateReply = TemplateLoaded | Rendered | RenderRefused

decode_command: Callable[[bytes], TemplateCommand] = msgspec.msgpack.Decoder(TemplateCommand).decode
decode_reply: Callable[[bytes], TemplateReply] = msgspec.msgpack.Decoder(TemplateReply).decode


def main() -> None:
    """Serve the socket with the number given as the only argument."""
    _set_limits()
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb")
    template: ChatTemplate | None = None
    while (body := read_frame(stream)) is not None:
        signal.setitimer(signal.ITIMER_REAL, RENDER_LIMIT_S)
        command = decode_command(body)
        if isinstance(command, LoadTemplate):
            template, reply = ChatTemplate(command.source), frame(TemplateLoaded())  # compiled by its first render
        else:
            assert template is not None, "the first command must be LoadTemplate"
            reply = _answer(template, command)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.sendall(reply)
        except OSError:
            return  # the server has ended


def _answer(template: ChatTemplate, command: Render) -> bytes:
    """Return the frame of a reply. Ends the process when memory runs out, without cleanup, which would need memory."""
    try:
        text = template.render(
            command.messages,
            tools=command.tools,
            limits=command.limits,
            add_generation_prompt=command.add_generation_prompt,
            continue_final_message=command.continue_final_message,
            **command.variables,
        )
        return frame(Rendered(text))
    except InvalidRequestError as error:
        if not isinstance(error.__cause__, MemoryError):
            return _refusal(str(error), error.param, error.code)
    except UnicodeEncodeError:
        return _refusal("the chat template has rendered half a surrogate pair", "messages", None)
    except MemoryError:
        pass  # not in the template, but in checking the messages or packing the text: end all the same
    os._exit(OUT_OF_MEMORY)


def _refusal(message: str, param: str | None, code: str | None) -> bytes:
    """Return the frame of a refusal; its text may be invalid Unicode written by a template."""
    return frame(RenderRefused(message.encode(errors="replace").decode(), param, code))


def _set_limits() -> None:
    """Ignore SIGINT and SIGTERM, which the server handles, and set the limits that the kernel enforces."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
