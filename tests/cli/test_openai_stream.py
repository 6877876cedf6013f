"""Events come out the same however the bytes are cut, and lists of models give a name or none."""

import pytest

from quire.cli.openai_stream import MAX_EVENT_BYTES, BrokenStreamError, EventDecoder, first_model_name

STREAM = (
    "data: first\n\n"
    ": a comment\n\n"
    "event: ping\nid: 7\nretry: 10\n\n"
    "data: crlf\r\n\r\n"
    "data:  日本 😀\n\n"
    "data: never ended"
)
EVENTS = ["first", "crlf", "日本 😀"]


def decode(stream: bytes, width: int) -> list[bytes]:
    decoder = EventDecoder()
    return [event for at in range(0, len(stream), width) for event in decoder.feed(stream[at : at + width])]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 1000])
def test_events_do_not_depend_on_how_the_stream_is_cut(width: int) -> None:
    assert [event.decode() for event in decode(STREAM.encode(), width)] == EVENTS


def test_an_event_is_there_as_soon_as_its_line_ends() -> None:
    decoder = EventDecoder()
    for end in ("\n", "\r\n"):
        assert decoder.feed(f"data: a{end}".encode()) == [b"a"]
        assert decoder.feed(b"") == []


@pytest.mark.parametrize("stream", [b"data: " + b"x" * MAX_EVENT_BYTES, b": " + b"x" * MAX_EVENT_BYTES])
def test_a_line_without_end_is_refused(stream: bytes) -> None:
    with pytest.raises(BrokenStreamError, match=str(MAX_EVENT_BYTES)):
        decode(stream, 65_536)


def test_many_events_and_comments_may_be_longer_in_all() -> None:
    long = b"x" * (MAX_EVENT_BYTES // 3)
    assert len(decode((b": " + long + b"\n" + b"data: " + long + b"\n\n") * 9, 65_536)) == 9


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"data": []}', b'{"data": [7]}', b"[" * 100_000])
def test_body_that_lists_no_model_has_no_first(body: bytes) -> None:
    assert first_model_name(body) is None
