"""Server-sent events, the part of them that carries data (WHATWG HTML, section 9.2)."""

from collections.abc import Iterator

from quire.cli.chat.back_end import ChatError

MAX_EVENT_BYTES = 4 * 1024 * 1024  # of a line, and of an event's data; a server may not fill the memory

_LINE_ENDS = (b"\r", b"\n")


class EventDecoder:
    """Turns the bytes of a stream, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._line = bytearray()          # begun, not ended
        self._data: list[bytes] = []      # lines of the event that is under way
        self._num_bytes = 0               # of both
        self._skips_newline = False       # the second half of a CRLF that was cut in two
        self._is_first_line = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of each event that `chunk` completes. ChatError when one grows too long."""
        if not chunk:
            return
        rest = chunk.removeprefix(b"\n") if self._skips_newline else chunk
        self._skips_newline = chunk.endswith(b"\r")
        for piece in rest.splitlines(keepends=True):   # of bytes: ends at CR, LF and CRLF, nothing else
            self._grow(piece.rstrip(b"\r\n"))
            if piece.endswith(_LINE_ENDS):
                yield from self._end_line()

    def _grow(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise ChatError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        self._line += piece

    def _end_line(self) -> Iterator[str]:
        line, self._line = bytes(self._line), bytearray()
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(b"\xef\xbb\xbf"), False
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            return
        self._num_bytes -= len(line)      # a comment, or a field that says nothing here
        if not line and self._data:
            yield b"\n".join(self._data).decode("utf-8", "replace")
            self._data.clear()
            self._num_bytes = 0
