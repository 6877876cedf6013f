"""Frames come out of a stream as they went in, and an end in the middle of one is an end."""

import io
from typing import Any

import msgspec
import pytest

from quire.core.frames import LENGTH_BYTES, frame, read_frame
from quire.core.token_ids import pack_tokens


class Word(msgspec.Struct, array_like=True):
    text: str


class Words(msgspec.Struct, array_like=True):
    packed: Any


def test_frames_come_back_one_by_one() -> None:
    words = [Word("a"), Word(""), Word("é" * 100_000)]
    stream = io.BytesIO(b"".join(map(frame, words)))
    for word in words:
        body = read_frame(stream)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=Word) == word
    assert read_frame(stream) is None


def test_array_is_its_bytes() -> None:
    body = read_frame(io.BytesIO(frame(Words(pack_tokens([1, -2, 3])))))
    assert body is not None
    assert msgspec.msgpack.decode(body) == [pack_tokens([1, -2, 3]).tobytes()]


def test_what_has_no_msgpack_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="a message with object"):
        frame(Words(object()))


@pytest.mark.parametrize("num_bytes", [0, 1, LENGTH_BYTES, LENGTH_BYTES + 3])
def test_a_frame_that_breaks_off_is_the_end(num_bytes: int) -> None:
    assert read_frame(io.BytesIO(frame(Word("abcdef"))[:num_bytes])) is None
