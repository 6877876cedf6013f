"""Frames: length-prefixed messages on a stream between two processes of the engine.

A frame is a length, four bytes in big-endian order, and that many bytes of msgpack. The stream ends when the other
process ends.
"""

from typing import BinaryIO

import msgspec

LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as a frame."""
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
