"""Reading of Harmony's messages (gpt-oss): headers say which are reasoning, which are content and which are calls.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning; a recipient `to=functions.NAME`, behind the
role or behind the channel, makes a message a call. Messages to other recipients and headers without a message are
dropped. Markers are markers only where a header or a message can end: elsewhere they are text.
"""

import re

from quire.server.tools.output_events import CallEvents, Content, Reasoning
from quire.text.tool_formats.reader import SPACE, Reader, Steps, any_of, atoms, kind_of, sequence

MAX_HEADER = 1024  # characters; of longer ones only the last are looked at

_CHANNEL, _START, _MESSAGE = (atoms(text) for text in ("<|channel|>", "<|start|>", "<|message|>"))
_FIRST_HEADER = any_of(sequence("header", [SPACE], [_CHANNEL, _START, _MESSAGE, atoms("to=")]))
_HEADER_END = any_of(sequence("message", _MESSAGE), sequence("start", _START))
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MESSAGE_END = any_of(
    *(sequence(f"end{number}", atoms(text), [_START, _CHANNEL]) for number, text in enumerate(_ENDS)),
    sequence("start", [], [atoms("<|start|>assistant")]),
)
_LAST_END = re.compile("(?:" + "|".join(map(re.escape, _ENDS)) + r")\s*\Z")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"functions\.([\w.\-]{1,128})\Z")


def read_messages(reader: Reader, calls: CallEvents, has_tools: bool) -> Steps[None]:
    """Read an output that is a sequence of messages; text in front of the first header is content."""

    def emit_content(text: str) -> None:
        calls.events.append(Content(text))

    def emit_reasoning(text: str) -> None:
        calls.events.append(Reasoning(text))

    is_bare = (yield from reader.match(_FIRST_HEADER)) is None
    header = "<|channel|>final" if is_bare else (yield from _read_header(reader))
    while header is not None:
        recipient = _RECIPIENT.search(header)
        function = _FUNCTION.match(recipient[1]) if recipient else None
        channels = _CHANNEL_NAME.findall(header)
        emit = emit_content
        if function and has_tools:
            calls.begin(function[1])
            yield from reader.skip_space()
            if (yield from reader.copy_json(calls.arguments)):
                calls.complete()
                calls.end()
            emit = _ignore
        elif recipient and recipient[1] != "assistant":
            emit = _ignore
        elif channels and channels[-1] == "analysis":
            emit = emit_reasoning
        if (yield from reader.copy_until(_MESSAGE_END, emit, _LAST_END)) is None:
            return
        header = yield from _read_header(reader)


def _read_header(reader: Reader) -> Steps[str | None]:
    """Read up to the end of the next header that has a message; return its text, None at the end of the output."""
    header = ""

    def collect(text: str) -> None:
        nonlocal header
        header = (header + text)[-MAX_HEADER:]

    while found := (yield from reader.copy_until(_HEADER_END, collect)):
        if kind_of(found) == "message":
            return header
        header = ""
    return None


def _ignore(text: str) -> None:
    """Drop a text."""
