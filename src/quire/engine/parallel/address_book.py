"""Address book of the ranks: entries that each publishes when they connect, sent over their own channels.

Loads no torch.
"""

import threading
from collections.abc import Callable

from quire.engine.parallel.messages import Published

FIND_TIMEOUT_S = 60.0


class AddressBook:
    """Entries by the number of the time that ranks connect, and by key. `publish` sends one to the other ranks."""

    def __init__(self, publish: Callable[[Published], None]) -> None:
        self._publish = publish
        self._entries = dict[tuple[int, str], bytes]()
        self._changed = threading.Condition()
        self._is_interrupted = False

    def add(self, entry: Published) -> None:
        """Add what another rank has published."""
        with self._changed:
            self._entries[entry.number, entry.key] = entry.value
            self._changed.notify_all()

    def publish(self, number: int, key: str, value: bytes) -> None:
        """Add an entry, on all ranks."""
        entry = Published(number, key, value)
        self.add(entry)
        self._publish(entry)

    def find(self, number: int, key: str) -> bytes | None:
        """Wait for an entry. None if it does not come, or finding is interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_interrupted or (number, key) in self._entries, FIND_TIMEOUT_S)
            return self._entries.get((number, key))

    def interrupt(self) -> None:
        """Let `find` return, now and until `begin` is called."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def begin(self, number: int) -> None:
        """Let `find` wait again, and forget the entries of earlier times."""
        with self._changed:
            self._is_interrupted = False
            self._entries = {place: value for place, value in self._entries.items() if place[0] >= number}
