"""Lingering close of refused connections, so that the response reaches a client that still sends.

Closing at once would reset the connection and discard the response. Lingering connections do not count towards
max_connections; they have a bound of their own, past which the oldest is closed.
"""

import asyncio

LINGER_S = 2.0       # between a refusal and the close
MAX_LINGERING = 64   # files are reserved for them (`quire.server.http.sockets`)


class LingeringConnections:
    """The lingering connections of one server. Lives on its event loop."""

    def __init__(self) -> None:
        self._closing: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._closing)

    def add(self, transport: asyncio.Transport) -> None:
        """Close a connection in LINGER_S seconds, or earlier if MAX_LINGERING are refused after it."""
        while len(self._closing) >= MAX_LINGERING:
            self.discard(oldest := next(iter(self._closing)))
            oldest.close()
        self._closing[transport] = asyncio.get_running_loop().call_later(LINGER_S, transport.close)

    def discard(self, transport: asyncio.Transport) -> None:
        """Remove a connection, which was closed or never lingered."""
        timer = self._closing.pop(transport, None)
        if timer is not None:
            timer.cancel()
