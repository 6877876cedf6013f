"""Frames: length-prefixed messages on a stream between two processes of the engine.

A frame is a length, four bytes in big-endian order, and that many bytes of msgpack, where an array is its bytes in the
machine's order. The stream ends when the other process ends.
"""

import select
import socket
from array import array
from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4


def _as_bytes(value: object) -> bytes:
    """Return an array as its bytes: those of a prompt of 100,000 tokens are copied, not encoded one by one."""
    if isinstance(value, array):
        return value.tobytes()
    raise TypeError(f"a message with {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)


def frame(message: object) -> bytes:
    """Return a message in msgpack, behind its length: LENGTH_BYTES bytes, big-endian."""
    body = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, body, LENGTH_BYTES)
    body[:LENGTH_BYTES] = (len(body) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(body)


def read_frame(stream: BinaryIO, most: int = (1 << 8 * LENGTH_BYTES) - 1) -> bytes | None:
    """Wait for the next frame and return its msgpack, or None at the end of the stream. `stream` is buffered.

    ValueError for a frame of more than `most` bytes: the other end is none of ours, or has not proven that it is.
    """
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    if length > most:
        raise ValueError(f"a frame of {length} bytes, more than {most}")
    body = stream.read(length)
    return body if len(head) == LENGTH_BYTES and len(body) == length else None


def has_room(connection: socket.socket) -> bool:
    """Return whether a short frame can be sent without waiting for the other end to read."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))
