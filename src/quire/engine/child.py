"""Starts the engine process, and makes sure that it ends.

The child holds one end of a socket pair and nothing else of ours: no port, no file. When our end closes, by intent or
because we die, it ends by itself.
"""

import socket
import subprocess
import sys
from dataclasses import dataclass

from quire.engine.options import EngineOptions
from quire.engine.wire import Start, frame

END_TIMEOUT_S = 3.0  # after its socket was closed; it takes milliseconds


@dataclass(frozen=True, slots=True)
class EngineChild:
    """A running engine process, and our end of the socket pair."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def spawn(cls, options: EngineOptions) -> "EngineChild":
        """Start the engine process; it begins to load at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [sys.executable, "-m", "quire.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        ours.sendall(frame(Start(options)))
        return cls(process, ours)

    def end(self) -> int:
        """Close our end and wait for the process, or kill it; return its exit status. Blocks. Twice is fine."""
        self.connection.close()
        try:
            return self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
