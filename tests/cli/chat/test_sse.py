"""Events come out the same however the bytes are cut."""

import pytest

from quire.cli.chat.back_end import ChatError
from quire.cli.chat.sse import MAX_EVENT_BYTES, EventDecoder

STREAM = (
    "\ufeffdata: first\n\n"
    ": a comment\n\n"
    "event: ping\nid: 7\nretry: 10\n\n"
    "data: crlf\r\n\r\n"
    "data: cr\r\r"
    "data: two\ndata:lines\ndata\n\n"
    "data:  日本 😀\n\n"
    "data: never ended"
)
EVENTS = ["first", "crlf", "cr", "two\nlines\n", " 日本 😀"]


def decode(stream: bytes, width: int) -> list[str]:
    decoder = EventDecoder()
    return [event for at in range(0, len(stream), width) for event in decoder.feed(stream[at : at + width])]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 1000])
def test_events_do_not_depend_on_how_the_stream_is_cut(width: int) -> None:
    assert decode(STREAM.encode(), width) == EVENTS


def test_an_event_is_there_as_soon_as_its_last_byte() -> None:
    decoder = EventDecoder()
    for end in ("\n", "\r", "\r\n"):
        assert list(decoder.feed(f"data: a{end}{end}".encode())) == ["a"]
        assert list(decoder.feed(b"")) == []


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert decode(b"data: a\xffb\n\n", 1000) == ["a\ufffdb"]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * MAX_EVENT_BYTES, b": " + b"x" * MAX_EVENT_BYTES])
def test_a_line_without_end_is_refused(stream: bytes) -> None:
    with pytest.raises(ChatError, match=str(MAX_EVENT_BYTES)):
        decode(stream, 65_536)


def test_an_event_of_too_many_lines_is_refused() -> None:
    with pytest.raises(ChatError, match=str(MAX_EVENT_BYTES)):
        decode((b"data: " + b"x" * 1000 + b"\n") * (MAX_EVENT_BYTES // 1000), 65_536)


def test_many_events_and_comments_may_be_longer_in_all() -> None:
    long = b"x" * (MAX_EVENT_BYTES // 3)
    assert len(decode((b": " + long + b"\n" + b"data: " + long + b"\n\n") * 9, 65_536)) == 9
