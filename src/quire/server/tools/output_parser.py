"""The incremental parser of a model's output: text in; content, reasoning and calls out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.tools.call_reader import CallReader, Outcome
from quire.server.tools.harmony import read_messages
from quire.server.tools.output_events import CallEvents, Content, Event, Reasoning
from quire.text.tool_formats.reader import Reader, Steps, kind_of, number_of
from quire.text.tool_formats.rows import ReasoningFormat, ToolFormat
from quire.text.tool_formats.syntax import syntax


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
        if outcome is Outcome.BROKEN:
            yield from self._reader.copy_until(self._syntax.after_broken, _ignore)

    def _read_bare_calls(self) -> Steps[None]:
        """Read calls without a marker, as long as there are any."""
        while (yield from self._attempt("", self._syntax.bare)) is Outcome.CALL:
            yield from self._reader.match(self._syntax.separator)

    def _attempt(self, marker: str, number: int) -> Steps[Outcome]:
        reader = self._reader
        assert self._call_reader is not None
        kept = reader.keep(marker)
        outcome = yield from self._call_reader.read(number)
        reader.kept = None
        if outcome is Outcome.NONE:
            if not marker or not reader.is_cut:
                self._emit("".join(kept))
            return outcome
        self._has_content = False
        if outcome is Outcome.CALL:
            yield from reader.match(self._syntax.tail)
        return outcome


def _ignore(text: str) -> None:
    """Drop a text."""
