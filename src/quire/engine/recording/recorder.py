"""Recorder: takes a scheduler's events, seals and replays them, and writes those that repeat into a file.

It runs in a process of its own (`python -m quire.engine.recording.recorder`), which outlives the engine: what the
engine has sent before it ended, however it did, is written. Sealing costs a microsecond a token, and replaying what
scheduling costs, so neither is work of the engine.
"""

import logging
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from quire.core.frames import read_frame
from quire.core.plan import decode_result, encode
from quire.engine.messages import AddRequest, add_message, decode_command
from quire.engine.recording.record import (
    Added,
    Closed,
    Event,
    Recording,
    Start,
    Updated,
    chunk,
    decode_event,
    encode_event,
    head,
)
from quire.engine.recording.replay import DifferenceError, Replay
from quire.engine.recording.sealing import Sealer

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18           # of events, uncompressed


class Recorder:
    """Writes the record of one scheduler, until `max_bytes`."""

    def __init__(self, start: Start, path: Path, max_bytes: int) -> None:
        self._replay = Replay(start)
        self._sealer = Sealer(self._replay.scheduler, keeps_tokens=start.has_tokens)
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        self._events = [encode_event(start)]
        self._num_pending = 0
        self.is_over = False        # nothing more is written
        self._write(head())

    def put(self, event: Event) -> None:
        """Take the next event."""
        if self.is_over:
            return
        sealed = self._sealed(event)
        encoded = encode_event(sealed)
        self._events.append(encoded)
        self._num_pending += len(encoded)
        try:
            self._replay.apply(sealed)
        except DifferenceError as difference:
            self.close(f"step {difference.step} could not be repeated: {difference.why or 'another plan'}")
        if self._num_pending >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was taken."""
        if self._events and not self.is_over:
            written, self._events, self._num_pending = chunk(self._events), [], 0
            self._write(written)
            if self._num_bytes >= self._max_bytes:
                self.close(f"it has reached its bound of {self._max_bytes} bytes")

    def close(self, reason: str = "") -> None:
        """Write what was taken, and end the file. `reason`: why it ends before the engine."""
        if self.is_over:
            return
        if reason:
            log.warning("the record ends: %s", reason)
        self.is_over = True
        self._write(chunk([*self._events, encode_event(Closed(reason))]))
        self._file.close()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        self._num_bytes += len(content)

    def _sealed(self, event: Event) -> Event:
        if isinstance(event, Added):
            added = decode_command(event.request)
            assert isinstance(added, AddRequest), f"a request, not {added}"
            sealed = self._sealer.request(added.request)
            return Added(event.arrived_s, msgspec.Raw(encode_event(add_message(sealed))))
        if isinstance(event, Updated):
            return Updated(msgspec.Raw(encode(self._sealer.result(decode_result(event.result)))))
        return event


def main() -> None:
    """Record what comes from the socket with the number given as the only argument, until it ends."""
    logging.basicConfig(format="%(asctime)s %(levelname)s recorder: %(message)s")
    events = socket.socket(fileno=int(sys.argv[1])).makefile("rb")
    if (first := read_frame(events)) is None:
        return
    recording = msgspec.msgpack.decode(first, type=Recording)
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}.quirelog"
    recorder = Recorder(recording.start, Path(recording.folder) / name, recording.max_bytes)
    while not recorder.is_over and (event := read_frame(events)) is not None:
        recorder.put(decode_event(event))
    recorder.close()


if __name__ == "__main__":
    main()
