"""Reading of one call of any format, from the end of its marker on, and the events of a parsed output.

One output gives one sequence of events. Texts of consecutive events of one kind (and call) are concatenated; a
sequence of pieces of any size gives the same concatenation.
"""

import html
import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from quire.server.tools.literal_arguments import GEMMA, PYTHON, Literals, types_of
from quire.text.tool_formats.reader import SPACE, Reader, Steps, any_of, kind_of, number_of, sequence
from quire.text.tool_formats.tool_format import NAME, Syntax, ToolFormat, json_value, split, string_text


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the reasoning, without its markers."""

    text: str


class CallBegan(NamedTuple):
    """The start of a tool call: emitted once, as soon as its name is known.

    `index` counts the calls of the output from 0. Calls begin in order, but an output may end inside a call.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of call `index`: JSON text, `{}` if the call has none.

    Pieces are emitted as they come. JSON that the model wrote is passed on as it is; other notations are translated.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    text: str


class CallEnded(NamedTuple):
    """The end of call `index`: its arguments are a closed JSON object.

    A call without this event is incomplete: the output was cut, or the arguments are no JSON. Calls of formats that
    write a list of calls end together, with the list.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index


Event = Content | Reasoning | CallBegan | Arguments | CallEnded


class CallEvents:
    """Appends the events of calls; one call is open at a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self._complete: list[int] = []  # calls with closed arguments, and no end emitted yet
        self._has_arguments = False

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self.events.append(CallBegan(self.num_calls, name))
        self.num_calls += 1
        self._has_arguments = False

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        self.events.append(Arguments(self.num_calls - 1, text))
        self._has_arguments = True

    def complete(self) -> None:
        """Note that the arguments of the call that began last are closed; none are `{}`."""
        if not self._has_arguments:
            self.arguments("{}")
        self._complete.append(self.num_calls - 1)

    def end(self) -> None:
        """End the calls with closed arguments."""
        self.events += [CallEnded(index) for index in self._complete]
        self._complete.clear()

    def abandon(self) -> None:
        """Leave the calls that have no end yet without one."""
        self._complete.clear()


MAX_KEPT = 65_536  # characters of a call in front of its name; a longer text is no call
MAX_VALUE = 1_048_576  # characters of a value that is read whole; a longer one is a string

_OPEN = any_of(sequence("open", [SPACE, r"\{"]))
_LIST = any_of(sequence("open", [SPACE, r"\["]))
_LIST_NEXT = any_of(sequence("next", [SPACE, ","]), sequence("close", [SPACE, r"\]"]))
_PYTHON_CALL = any_of(sequence("head", [SPACE, f"(?P<_name>{NAME})", SPACE, r"\("]))
_KEY = any_of(
    sequence("key", [SPACE, ",?+", SPACE, '"', r'(?P<_key>[^"\\]{1,256}+)', '"', SPACE, ":"]),
    sequence("close", [SPACE, r"\}"]),
)
_NAME = any_of(sequence("name", [SPACE, '"', r'(?P<_name>[^"\\\s]{1,128}+)', '"']))
_VALUE = any_of(
    sequence("brackets", [SPACE], [[r"[{\[]"]]),
    sequence("string", [SPACE, '"']),
    sequence("scalar", [SPACE, r"(?P<_scalar>[\w+\-.]{1,64}+)"], [[r"[\s,}\]]"]]),
)
_TEXT = frozenset({"string"})
_ANY: frozenset[str] = frozenset()
_ARGUMENTS = ("arguments", "parameters")


class CallOutcome(Enum):
    """Outcome of reading a call."""

    NONE = "no call"  # what was consumed is text
    BROKEN = "a call without an end"
    CALL = "a call"


class CallReader:
    """Reads calls. While a call may turn out to be none, the reader of the text keeps what is consumed of it."""

    def __init__(
        self, row: ToolFormat, syntax: Syntax, tools: Mapping[str, Any], reader: Reader, calls: CallEvents
    ) -> None:
        self._row = row
        self._syntax = syntax
        self._tools = tools  # JSON schemas of parameters, by the tool's name
        self._reader = reader
        self._calls = calls
        self._templates = [split(template) for template in (row.call, *row.variants)]

    def read(self, marker: int) -> Steps[CallOutcome]:
        """Read what follows marker number `marker` of the syntax."""
        head = yield from self._reader.match(self._syntax.heads[marker])
        if head is None:
            return CallOutcome.NONE
        if kind_of(head) == "json":
            return (yield from self._json_calls())
        if kind_of(head) == "list":
            return (yield from self._python_calls())
        number = number_of(head)
        template, name = self._templates[number], head[f"_name{number}"]
        self._begin(name)
        if "parameters" in template:
            is_closed = yield from self._tagged_parameters(name)
        elif "arguments" in template:
            yield from self._reader.skip_space()
            if self._row.notation == "gemma":
                yield from self._reader.match(_OPEN)
                is_closed = yield from Literals(self._reader, self._calls.arguments, GEMMA).arguments()
            else:
                is_closed = yield from self._reader.copy_json(self._calls.arguments)
        else:
            is_closed = True
        return self._end() if is_closed else CallOutcome.BROKEN

    def _begin(self, name: str) -> None:
        self._reader.kept = None  # from here on it is a call
        self._calls.begin(name)

    def _end(self) -> CallOutcome:
        self._calls.complete()
        self._calls.end()
        return CallOutcome.CALL

    def _json_calls(self) -> Steps[CallOutcome]:
        """Read an object with a name and arguments, or a list of such."""
        reader = self._reader
        if reader.buffer[reader.at] == "{":
            return (yield from self._json_call())
        yield from reader.match(_LIST)
        has_call = False
        while True:
            outcome = yield from self._json_call()
            if outcome is not CallOutcome.CALL:
                return CallOutcome.BROKEN if has_call else outcome
            has_call = True
            following = yield from reader.match(_LIST_NEXT)
            if following is None or kind_of(following) == "close":
                return outcome

    def _json_call(self) -> Steps[CallOutcome]:
        reader, calls = self._reader, self._calls
        name = ""
        early: list[str] = []  # arguments in front of the name
        if (yield from reader.match(_OPEN)) is None:
            return CallOutcome.NONE
        while reader.num_kept <= MAX_KEPT and (found := (yield from reader.match(_KEY))):
            if kind_of(found) == "close":
                return self._end() if name else CallOutcome.NONE
            key = found["_key"]
            if self._row.has_name_as_key and not name:
                name = key
                self._begin(name)
                if not (yield from self._json_arguments([], True)):
                    break
            elif key == self._row.keys[0] and not name:
                if (found := (yield from reader.match(_NAME))) is None:
                    return CallOutcome.NONE
                name = found["_name"]
                if self._row.is_bare and name not in self._tools:
                    return CallOutcome.NONE
                self._begin(name)
                reader.num_kept = 0
                for text in early:
                    calls.arguments(text)
            elif key in _ARGUMENTS:
                if not (yield from self._json_arguments(early, bool(name))):
                    break
            elif (self._row.is_bare and key not in ("type", "id")) or not (yield from self._skip_value()):
                break
        return CallOutcome.BROKEN if name else CallOutcome.NONE

    def _json_arguments(self, early: list[str], is_call: bool) -> Steps[bool]:
        """Read arguments: an object, a string that holds one, or null."""
        reader = self._reader
        found = yield from reader.match(_VALUE)
        if found is None:
            return False
        kind = kind_of(found)
        emit = self._calls.arguments if is_call else early.append
        if kind == "brackets":
            return (yield from reader.copy_json(emit, None if is_call else MAX_KEPT))
        if kind == "scalar":
            return found["_scalar"] == "null"
        pieces: list[str] = []
        if not (yield from reader.copy_string(pieces.append, MAX_VALUE if is_call else MAX_KEPT)):
            return False
        try:
            emit(json.loads(f'"{"".join(pieces)}"', strict=False))
        except ValueError:
            return False
        return True

    def _skip_value(self) -> Steps[bool]:
        found = yield from self._reader.match(_VALUE)
        if found is None:
            return False
        if kind_of(found) == "brackets":
            return (yield from self._reader.copy_json(_ignore, MAX_KEPT))
        return kind_of(found) == "scalar" or (yield from self._reader.copy_string(_ignore, MAX_KEPT))

    def _python_calls(self) -> Steps[CallOutcome]:
        """Read a list of calls in Python; they end with the list."""
        reader = self._reader
        yield from reader.match(_LIST)
        has_call = False
        while head := (yield from reader.match(_PYTHON_CALL)):
            if self._row.is_bare and not has_call and head["_name"] not in self._tools:
                return CallOutcome.NONE
            self._begin(head["_name"])
            has_call = True
            if not (yield from Literals(reader, self._calls.arguments, PYTHON).arguments()):
                break
            self._calls.complete()
            following = yield from reader.match(_LIST_NEXT)
            if following is not None and kind_of(following) == "close":
                self._calls.end()
                return CallOutcome.CALL
            if following is None:
                break
        self._calls.abandon()
        return CallOutcome.BROKEN if has_call else CallOutcome.NONE

    def _tagged_parameters(self, name: str) -> Steps[bool]:
        """Read parameters one by one up to the end of the call; write them as a JSON object."""
        reader, patterns, write = self._reader, self._syntax.parameter, self._calls.arguments
        schema = self._tools.get(name)
        keys: set[str] = set()
        while found := (yield from reader.match(patterns.head)):
            if kind_of(found) == "close":
                if keys:
                    write("}")
                return True
            key = html.unescape(found["_key"]) if self._row.is_escaped else found["_key"]
            types = _written_types(found) or types_of(schema, key)
            is_new = key not in keys
            if is_new:
                write(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            end = yield from self._parameter_value(types, is_new)
            if end is None:
                break
            if end.lastgroup is None:  # the call's end was the output's
                write("}")
                return True
        return False

    def _parameter_value(self, types: frozenset[str] | None, is_new: bool) -> Steps[re.Match[str] | None]:
        """Read a value and what ends it; write it, if it is the first one of its key, as JSON of one of the types."""
        patterns, write = self._syntax.parameter, self._calls.arguments if is_new else _ignore
        pieces: list[str] = []
        length = 0
        is_text = types == _TEXT

        def write_text(text: str) -> None:
            write(string_text(text))

        def collect(text: str) -> None:
            nonlocal length, is_text
            length += len(text)
            if is_text:
                write_text(text)
            elif length <= MAX_VALUE:
                pieces.append(text)
            else:
                is_text = True
                write('"' + string_text("".join(pieces) + text))

        if is_text:
            write('"')
        end = yield from self._reader.copy_until(patterns.value_end, collect, patterns.value_end_at_end)
        if end is not None:
            write('"' if is_text else json_value("".join(pieces), types))
        return end


def _written_types(found: re.Match[str]) -> frozenset[str] | None:
    """Return the type that a parameter is marked with: a string, or any JSON."""
    written = found.groupdict().get("_type")
    if written is None:
        return None
    return _TEXT if written in ("true", "string") else _ANY


def _ignore(text: str) -> None:
    """Drop a text."""
