"""Stop strings are found in the text, however it was cut into pieces, and never leak."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.engine.requests.stop_strings import StopMatcher, StopStringFinder

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=12)


def feed_all(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """Return the text up to its end, and the stop string that ended it."""
    finder = StopStringFinder(StopMatcher(stops), include=include)
    text = ""
    for piece in pieces:
        certain, stop = finder.feed(piece)
        text += certain
        if stop is not None:
            return text, stop
    return text + finder.flush(), None


def oracle(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every prefix of the text, shortest first, and at every stop string."""
    text = ""
    for piece, may_stop in pieces:
        for char in piece:
            text += char
            found = [stop for stop in stops if may_stop and text.endswith(stop)]
            if found:
                longest = max(found, key=len)
                return (text if include else text.removesuffix(longest)), longest
    return text, None


@given(PIECES, STOPS, st.booleans())
@example([("a", True), ("ab", True)], ["aab"], False)
@example([("ab", False), ("ab", True)], ["abab"], False)
@example([("abab", False), ("ab", True)], ["abab"], False)
def test_cut_equals_a_plain_search_and_nothing_leaks(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    expected, expected_stop = oracle(pieces, stops, include)
    finder = StopStringFinder(StopMatcher(stops), include=include)
    seen, given_out, stop = "", "", None
    for piece, may_stop in pieces:
        certain, stop = finder.feed(piece, may_stop=may_stop)
        seen, given_out = seen + piece, given_out + certain
        assert expected.startswith(given_out)
        if stop is not None:
            break
        held = seen.removeprefix(given_out)
        begun = max(n for stop_ in stops for n in range(len(stop_)) if seen.endswith(stop_[:n]))
        assert len(held) == (0 if include else begun), "held back what begins a stop string, and no more"
    assert (given_out + ("" if stop else finder.flush()), stop) == (expected, expected_stop)


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], ["one ", "E", "N", "D"], [*"one END two"]])
def test_straddling_pieces_changes_nothing(pieces: list[str]) -> None:
    assert feed_all(pieces, ["END"]) == ("one ", "END")
    assert feed_all(pieces, ["END"], include=True) == ("one END", "END")


def test_stop_string_that_is_complete_first_wins() -> None:
    assert feed_all(["say stop now please"], ["please", "now", "stop"]) == ("say ", "stop")
    assert feed_all(["abcdef"], ["bcdef", "cd"]) == ("ab", "cd"), "it began later, but it was complete first"


def test_longer_of_two_that_end_together_wins() -> None:
    for stops in (["\n", "\n\n"], ["\n\n", "\n"]):
        assert feed_all(["x\n\ny"], stops) == ("x", "\n"), "the single newline is complete first"
    for stops in (["ND", "END"], ["END", "ND"]):
        assert feed_all(["x E", "ND"], stops) == ("x ", "END")
        assert feed_all(["x E", "ND"], stops, include=True) == ("x END", "END")


def test_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    finder = StopStringFinder(StopMatcher(["###"]), include=False)
    assert finder.feed("a ##") == ("a ", None)
    assert finder.feed("b #") == ("##b ", None)
    assert finder.flush() == "#"
    assert finder.flush() == ""


def test_nothing_is_held_back_when_the_stop_string_stays_in_the_text() -> None:
    finder = StopStringFinder(StopMatcher(["###"]), include=True)
    assert finder.feed("a ##") == ("a ##", None)
    assert finder.feed("# b") == ("#", "###")


def test_stop_string_counts_from_the_piece_that_completes_it() -> None:
    finder = StopStringFinder(StopMatcher(["ab"]), include=False)
    assert finder.feed("ab a", may_stop=False) == ("ab ", None)
    assert finder.feed("b") == ("", "ab")


def test_same_stop_string_twice_and_longer_than_the_text() -> None:
    assert feed_all(["xab"], ["ab", "ab"]) == ("x", "ab")
    assert feed_all(["ab"], ["ab" * 1000]) == ("ab", None)


def test_branches_share_what_has_been_computed() -> None:
    matcher = StopMatcher(["the end", "then", "hen house"])
    first, second = (StopStringFinder(matcher, include=False) for _ in range(2))
    assert first.feed("see the") == ("see ", None)
    assert second.feed("a hen h") == ("a ", None)
    assert first.feed("n") == ("", "then")
    assert second.feed("ouse") == ("", "hen house")


def test_64_stop_strings_cost_as_many_looks_as_one() -> None:
    class CountedStr(str):
        looks = 0

        def __getitem__(self, key):  # noqa: ANN001, ANN204
            CountedStr.looks += 1
            return super().__getitem__(key)

    matcher = StopMatcher([CountedStr("t" + "e" * 900 + f"{number:02}") for number in range(64)])
    text = "t" + "e" * 899 + "tee"
    finder = StopStringFinder(matcher, include=False)
    CountedStr.looks = 0
    for char in text * 4:
        finder.feed(char)
    assert CountedStr.looks <= 4 * len(text) * 4


def test_hostile_stop_string_costs_one_look_per_character() -> None:
    class CountedStr(str):
        looks = 0

        def __getitem__(self, key):  # noqa: ANN001, ANN204
            CountedStr.looks += 1
            return super().__getitem__(key)

    stop, text = CountedStr("a" * 2000 + "b"), "a" * 20_000
    finder = StopStringFinder(StopMatcher([stop]), include=False)
    CountedStr.looks = 0
    for char in text:
        finder.feed(char)
    assert CountedStr.looks <= 4 * len(text)


def test_many_prefixes_of_each_other_need_no_recursion() -> None:
    stops = ["a" * length + "b" for length in range(1, 1025)]
    assert feed_all(["a" * 3000, "b"], stops) == ("a" * (3000 - 1024), stops[-1])
