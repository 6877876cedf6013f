"""The incremental parser: events of outputs in any pieces."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.tools.output_format import (
    Arguments,
    CallBegan,
    CallEnded,
    Content,
    Event,
    OutputParser,
    Reasoning,
    find_format,
    find_reasoning,
)

HERMES_OUTPUT = (
    "<think>\nTwo calls.\n</think>\n\nLet me see: a < b.\n<tool_call>\n"
    '{"name": "echo", "arguments": {"text": "</tool_call> \\" }"}}\n</tool_call>\n<tool_call>'
    '{"arguments": {}, "name": "now"}</tool_call> Done. <tool_call> is a tag, </tool_call> too.'
)


def parse(name: str, pieces: Iterable[str], reasoning: str = "none", in_reasoning: bool = False) -> list[Event]:
    """Return the events of an output in pieces, with texts of one kind joined."""
    parser = OutputParser(find_format(name), [], in_reasoning, find_reasoning(reasoning))
    events: list[Event] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        last = events[-1] if events else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            events[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, Content | Reasoning) and type(event) is type(last):
            events[-1] = type(event)(last.text + event.text)
        else:
            events.append(event)
    return events


def test_hermes_output_becomes_events() -> None:
    assert parse("hermes", [HERMES_OUTPUT], "qwen3") == [
        Reasoning("Two calls."),
        Content("Let me see: a < b."),
        CallBegan(0, "echo"),
        Arguments(0, '{"text": "</tool_call> \\" }"}'),
        CallEnded(0),
        CallBegan(1, "now"),
        Arguments(1, "{}"),
        CallEnded(1),
        Content(" Done. <tool_call> is a tag, </tool_call> too."),
    ]


@settings(max_examples=50)
@given(st.lists(st.integers(0, len(HERMES_OUTPUT)), max_size=20))
def test_pieces_do_not_change_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(HERMES_OUTPUT)]
    pieces = [HERMES_OUTPUT[start:stop] for start, stop in itertools.pairwise(places)]
    assert parse("hermes", pieces, "qwen3") == parse("hermes", [HERMES_OUTPUT], "qwen3")


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    parser = OutputParser(find_format("hermes"))
    assert parser.feed("a <tool_") == [Content("a")]
    assert parser.feed("box>") == [Content(" <tool_box>")]
    assert parser.feed("<tool_call>{") == []
    assert parser.feed('"name": "f"') == [CallBegan(0, "f")]
    assert parser.feed(', "arguments": {"a": 1') == [Arguments(0, '{"a": 1')]


def test_cut_output_has_no_end_of_its_call() -> None:
    cut = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert cut == [CallBegan(0, "f"), Arguments(0, '{"a": "b')]
    assert parse("hermes", ["Yes.\n<tool_call>\n"]) == [Content("Yes.")]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tool-call-parser 'hermse' is unknown; choose auto, none, .*hermes"):
        find_format("hermse")
