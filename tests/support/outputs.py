"""Outputs of models, parsed: events with texts of one kind joined."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.server.tools.call_reader import Arguments, CallBegan, CallEnded, Content, Event, Reasoning
from quire.server.tools.output_parser import OutputParser
from quire.text.tool_formats.table import find_format, find_reasoning


def joined(events: Iterable[Event]) -> list[Event]:
    """Join the texts of consecutive events of one kind."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            result[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, Content | Reasoning) and type(event) is type(last):
            result[-1] = type(event)(last.text + event.text)
        else:
            result.append(event)
    return result


def parse(
    name: str,
    pieces: Iterable[str],
    reasoning: str = "none",
    in_reasoning: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Event]:
    """Return the joined events of an output that comes in pieces."""
    parser = OutputParser(find_format(name), tools, in_reasoning, find_reasoning(reasoning))
    return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def ended_calls(events: Iterable[Event]) -> list[tuple[str, str]]:
    """Return names and arguments of the calls that ended."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegan):
            names[event.index] = event.name
        elif isinstance(event, Arguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
        elif isinstance(event, CallEnded):
            calls.append((names[event.index], arguments[event.index]))
    return calls


def texts(events: Iterable[Event], kind: type[Content] | type[Reasoning]) -> str:
    """Return all content, or all reasoning."""
    return "".join(event.text for event in events if isinstance(event, kind))
