"""JSON in pieces is the JSON that one call would have made."""

import json
from itertools import chain

import pytest

from quire.server.api.http_responses import JsonStream, array, array_from_values, encode, encode_streamed, joined


def test_values_stand_where_they_belong_whatever_is_around_them() -> None:
    tricky = 'a\x00"[],'
    slices = (encode(each) for each in ([1, 2], [tricky]))
    both = JsonStream(iter((b"1", b"2")))
    message = {"a": tricky, "b": JsonStream(array(slices)), "c": {"d": [both, None]}, tricky: 0}
    written = b"".join(encode_streamed(message))
    assert json.loads(written) == {"a": tricky, "b": [1, 2, tricky], "c": {"d": [12, None]}, tricky: 0}


def test_pieces_may_have_pieces() -> None:
    inner = (encode_streamed({"n": JsonStream(iter((encode(number),)))}) for number in range(3))
    written = b"".join(encode_streamed({"all": JsonStream(array_from_values(inner))}))
    assert json.loads(written) == {"all": [{"n": n} for n in range(3)]}


@pytest.mark.parametrize("num_values", [0, 1, 2])
def test_arrays_of_any_length(num_values: int) -> None:
    values = [encode(number) for number in range(num_values)]
    assert json.loads(b"".join(array_from_values(iter((value,)) for value in values))) == [*range(num_values)]
    assert json.loads(b"".join(array(b"[" + value + b"]" for value in values))) == [*range(num_values)]


def test_nothing_is_made_before_it_is_asked_for() -> None:
    made: list[int] = []

    def pieces() -> chain[bytes]:
        return chain.from_iterable((made.append(n) or b"x" * 10,) for n in range(100))  # type: ignore[func-returns-value]

    written = joined(encode_streamed([JsonStream(pieces())]), 35)
    assert len(next(written)) >= 35
    assert len(made) == 4
    assert b"".join((b"", *written)).endswith(b"]")
    assert len(made) == 100


def test_joined_pieces_are_the_same_bytes() -> None:
    parts = [b"a" * n for n in (0, 5, 1, 9, 0, 3)]
    found = [*joined(iter(parts), 6)]
    assert b"".join(found) == b"".join(parts)
    assert [len(each) for each in found] == [5, 10, 3]  # an empty piece was a slice of work, too
    assert [*joined(iter([b""]), 6)] == []


def test_anything_else_is_a_fault() -> None:
    with pytest.raises(NotImplementedError, match="object has no JSON"):
        encode_streamed([object()])
