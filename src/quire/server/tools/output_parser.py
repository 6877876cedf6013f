"""The incremental parser of a model's output: text in; content, reasoning and calls out.

Headers of Harmony's messages (gpt-oss) say which are reasoning, which are content and which are calls:
`<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning; a recipient `to=functions.NAME`, behind the
role or behind the channel, makes a message a call. Messages to other recipients and headers without a message are
dropped. Markers are markers only where a header or a message can end: elsewhere they are text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.tools.call_reader import CallEvents, CallOutcome, CallReader, Content, Event, Reasoning
from quire.text.tool_formats.reader import SPACE, Reader, Steps, any_of, atoms, kind_of, number_of, sequence
from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat, syntax

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


class OutputParser:
    """Parses one output; what it emits does not depend on how the text is cut into pieces.

    `tools` are OpenAI's tool objects: their schemas give the types of arguments that are written as text. The text must
    contain special tokens, apart from those that end the output. Only text is held back that may still become a marker.
    """

    def __init__(
        self,
        row: ToolFormat | None,
        tools: Sequence[Mapping[str, Any]] = (),
        starts_in_reasoning: bool = False,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self._syntax = syntax(row, reasoning)
        self._reader = Reader()
        self._calls = CallEvents()
        schemas = {}
        for tool in tools:
            function = tool.get("function", tool)
            schemas[function["name"]] = function.get("parameters")
        self._call_reader = CallReader(row, self._syntax, schemas, self._reader, self._calls) if row else None
        self._row = row
        self._has_channels = any(part is not None and part.has_channels for part in (row, reasoning))
        self._is_bare = row is not None and row.is_bare
        self._is_reasoning = starts_in_reasoning and reasoning is not None
        self._has_content = False  # since the start, or the last call: reasoning may begin only before it
        self._steps = self._read()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Add a piece of the output; return the events that are certain now."""
        self._reader.add(text)
        next(self._steps)
        return self._take()

    def finish(self) -> list[Event]:
        """End the output; return the last events. Text that was held back is emitted, but for the start of a call."""
        self._reader.is_last = True
        for _ in self._steps:
            raise AssertionError("the parser waits for text that does not come")
        return self._take()

    @property
    def num_held(self) -> int:
        """Return the number of characters that were fed and not turned into events yet."""
        reader = self._reader
        return len(reader.buffer) - reader.at + (reader.num_kept if reader.kept is not None else 0)

    def _take(self) -> list[Event]:
        events = self._calls.events
        self._calls.events = []
        return events

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._is_reasoning:
            self._calls.events.append(Reasoning(text))
            return
        self._calls.events.append(Content(text))
        self._has_content = self._has_content or not text.isspace()

    def _read(self) -> Steps[None]:
        reader = self._reader
        yield
        if self._has_channels:
            yield from read_messages(reader, self._calls, self._row is not None)
            return
        if self._is_reasoning:
            yield from reader.match(self._syntax.start)  # written although the prompt ends with it, or implies it
            yield from reader.skip_space()
        if self._is_bare and not self._is_reasoning:
            yield from self._read_bare_calls()
        while found := (
            yield from reader.copy_until(
                self._syntax.reasoning if self._is_reasoning else self._syntax.content, self._emit
            )
        ):
            match kind_of(found):
                case "call":
                    yield from self._read_call(found)
                case "section":
                    yield from self._read_section()
                case "reasoning" if self._has_content:
                    self._emit(found[0])
                case "reasoning":
                    self._is_reasoning = True
                    yield from reader.skip_space()
                case "end" | "other":
                    self._is_reasoning = False
                    yield from reader.skip_space()
                case "drop" if not self._has_content:
                    yield from reader.skip_space()
            if self._is_bare and not self._is_reasoning and not self._has_content:
                yield from self._read_bare_calls()

    def _read_section(self) -> Steps[None]:
        """Read the calls of a section; other text in it is dropped."""
        while found := (yield from self._reader.copy_until(self._syntax.section, _ignore)):
            if kind_of(found) == "section_end":
                return
            yield from self._read_call(found)

    def _read_call(self, found: re.Match[str]) -> Steps[None]:
        """Read the call behind a marker; if it is none, emit it as text."""
        assert self._call_reader is not None
        outcome = yield from self._attempt(found[0], number_of(found))
        if outcome is CallOutcome.BROKEN:
            yield from self._reader.copy_until(self._syntax.after_broken, _ignore)

    def _read_bare_calls(self) -> Steps[None]:
        """Read calls without a marker, as long as there are any."""
        while (yield from self._attempt("", self._syntax.bare)) is CallOutcome.CALL:
            yield from self._reader.match(self._syntax.separator)

    def _attempt(self, marker: str, number: int) -> Steps[CallOutcome]:
        reader = self._reader
        assert self._call_reader is not None
        kept = reader.keep(marker)
        outcome = yield from self._call_reader.read(number)
        reader.kept = None
        if outcome is CallOutcome.NONE:
            if not marker or not reader.is_cut:
                self._emit("".join(kept))
            return outcome
        self._has_content = False
        if outcome is CallOutcome.CALL:
            yield from reader.match(self._syntax.tail)
        return outcome


def _ignore(text: str) -> None:
    """Drop a text."""
