"""Streamed JSON encoding: a value that would block the event loop is encoded slice by slice.

A message is encoded with a placeholder for each `JsonStream`: a byte that JSON cannot contain otherwise.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import msgspec

encode = msgspec.json.Encoder().encode
_SLICE_BYTES = 1024  # a longer piece was a slice of work, whatever its length
_PLACEHOLDER = b"\x00"  # inside a string it would be escaped


class JsonStream:  # no dataclass: msgspec would encode one by itself
    """A value of a message that is encoded piece by piece, once."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces


class _PiecesFoundError(Exception):
    """A message has a JsonStream in it."""


def _refuse_pieces(value: object) -> NoReturn:
    if isinstance(value, JsonStream):
        raise _PiecesFoundError
    raise NotImplementedError(f"{type(value).__name__} has no JSON")


_encode_whole = msgspec.json.Encoder(enc_hook=_refuse_pieces).encode


def encode_streamed(message: Any) -> Iterable[bytes]:  # noqa: ANN401 (JSON)
    """Return the JSON of a message that may have `JsonStream` in it."""
    try:
        return (_encode_whole(message),)
    except _PiecesFoundError:
        return _encode_around(message)


def _encode_around(message: Any) -> Iterator[bytes]:  # noqa: ANN401 (JSON)
    found: list[JsonStream] = []

    def placeholder_of(value: object) -> msgspec.Raw:
        assert isinstance(value, JsonStream), "anything else was refused"
        found.append(value)
        return msgspec.Raw(_PLACEHOLDER)

    head, *tails = msgspec.json.encode(message, enc_hook=placeholder_of).split(_PLACEHOLDER)
    yield head
    for value, tail in zip(found, tails, strict=True):
        yield from value.pieces
        yield tail


def array(slices: Iterable[bytes | Iterator[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of an array from slices of it: arrays that are not empty, or the pieces of one long element."""
    yield b"["
    between = b""
    for each in slices:
        if isinstance(each, bytes):
            yield between + each[1:-1]
        else:
            yield between
            yield from each
        between = b","
    yield b"]"


def array_from_values(values: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of an array from that of its values."""
    yield b"["
    between = b""
    for value in values:
        yield between
        yield from value
        between = b","
    yield b"]"


def joined(pieces: Iterable[bytes], least_bytes: int) -> Iterator[bytes]:
    """Yield the same bytes in slices of bounded work: at least `least_bytes`, or two pieces of a long value.

    An empty piece stands for a slice of work that has written nothing yet. A slice may be empty then.
    """
    held: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        held.append(piece)
        is_slice = not piece or len(piece) >= _SLICE_BYTES
        num_bytes += max(len(piece), least_bytes // 2) if is_slice else len(piece)
        if num_bytes >= least_bytes:
            yield b"".join(held)
            held, num_bytes = [], 0
    if any(held):
        yield b"".join(held)
