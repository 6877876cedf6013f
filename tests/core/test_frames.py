"""Frames come out of a stream as they went in, and an end in the middle of one is an end."""

import io

import msgspec
import pytest

from quire.core.frames import LENGTH_BYTES, frame, read_frame


class Word(msgspec.Struct, array_like=True):
    text: str


def test_frames_come_back_one_by_one() -> None:
    words = [Word("a"), Word(""), Word("é" * 100_000)]
    stream = io.BytesIO(b"".join(map(frame, words)))
    for word in words:
        body = read_frame(stream)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=Word) == word
    assert read_frame(stream) is None


@pytest.mark.parametrize("num_bytes", [0, 1, LENGTH_BYTES, LENGTH_BYTES + 3])
def test_a_frame_that_breaks_off_is_the_end(num_bytes: int) -> None:
    assert read_frame(io.BytesIO(frame(Word("abcdef"))[:num_bytes])) is None
