"""Frames: how messages travel over a stream between two of our processes.

A frame is a length, four bytes with the highest first, and that many bytes of msgpack. The end of the stream means that
the other side is gone.
"""

from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Return a message ready to be sent."""
    body = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, body, LENGTH_BYTES)
    body[:LENGTH_BYTES] = (len(body) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(body)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Wait for the next frame and return its msgpack, or None at the end of the stream. `stream` is buffered."""
    head = stream.read(LENGTH_BYTES)
    length = int.from_bytes(head, "big")
    body = stream.read(length)
    return body if len(head) == LENGTH_BYTES and len(body) == length else None
