"""Reasoning in the text of outputs: stop strings are looked for behind it, however the text is cut into pieces."""

import pytest

from quire.engine.requests.reasoning_gate import MAX_BLANKS, ReasoningGate, ReasoningMarkers
from quire.engine.requests.stop_strings import StopMatcher, StopStringFinder

THINK = ReasoningMarkers(("<think>",), ("</think>", "<call>"))
OPEN = THINK._replace(is_open=True)
CHANNELS = ReasoningMarkers(("<a>",), ("<end>",), recurs=True)


def parts(markers: ReasoningMarkers, text: str, num_chars: int) -> list[tuple[str, bool]]:
    """Return the text in stretches of reasoning and of others, read in pieces of a length."""
    gate = ReasoningGate(markers)
    pieces = [text[at : at + num_chars] for at in range(0, len(text), num_chars)]
    found = [part for piece in pieces for part in gate.split(piece)] + list(gate.split("", is_last=True))
    joined: list[tuple[str, bool]] = []
    for part, is_searched in found:
        if joined and joined[-1][1] == is_searched:
            joined[-1] = joined[-1][0] + part, is_searched
        elif part:
            joined.append((part, is_searched))
    return joined


@pytest.mark.parametrize("num_chars", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        (THINK, [("<think>a < b</think>\n\n", False), ("It </think> is <think>", True)]),
        (THINK, [("\n <think>a</thi<call>", False), ("b", True)]),
        (THINK, [("\n <thi", True)]),
        (THINK, [("no <think>a</think>", True)]),
        (THINK, [("<think>cut in </thin", False)]),
        (OPEN, [("a<think></think>", False), ("b", True)]),
        (OPEN, [("never </ ended", False)]),
        (CHANNELS, [("b < c", True), ("<a>x<end> ", False), ("y", True), ("<a>z", False)]),
        (CHANNELS, [("b <", True)]),
    ],
)
def test_stretches_do_not_depend_on_pieces(
    markers: ReasoningMarkers, expected: list[tuple[str, bool]], num_chars: int
) -> None:
    assert parts(markers, "".join(text for text, _ in expected), num_chars) == expected


def test_text_that_cannot_be_a_marker_is_not_held() -> None:
    gate = ReasoningGate(OPEN)
    assert list(gate.split("abc <")) == [("abc ", False)]
    assert list(gate.split("/thinx")) == [("</thinx", False)]
    gate = ReasoningGate(THINK)
    assert list(gate.split(" " * MAX_BLANKS)) == []
    assert list(gate.split(" ")) == [(" " * (MAX_BLANKS + 1), True)]


@pytest.mark.parametrize("num_chars", [1, 2, 4, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_match_behind_the_reasoning_alone(include: bool, num_chars: int) -> None:
    finder = StopStringFinder(StopMatcher(["Q:", "k>\n\nI", "\n\n"]), include=include, reasoning=THINK)
    output = "<think>Q: ?</think>\n\nIt is.\nQ: next"
    text = ""
    for at in range(0, len(output), num_chars):
        piece, stop = finder.feed(output[at : at + num_chars])
        text += piece
        if stop is not None:
            break
    assert (text, stop) == ("<think>Q: ?</think>\n\nIt is.\n" + ("Q:" if include else ""), "Q:")
