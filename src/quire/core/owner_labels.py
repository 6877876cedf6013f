"""Labels of those whom requests belong to, for figures that people see: an API key by its number, a salt by a digest.

Neither keys nor salts can be read from a label. There is a bounded number of labels, since metrics keep each that
they have ever seen: a client that sends salt after salt gets no more of them.
"""

import hashlib
import threading

MAX_KEYS = 32        # with a label of their own
MAX_SALTS = 32       # under all keys and none together, by first appearance
OTHER = "other"
UNLABELLED = ""      # came without a key, and without a salt

_DIGEST_CHARS = 8


class OwnerLabels:
    """Gives labels, always the same one to the same owner. For any thread."""

    def __init__(self) -> None:
        self._salted: set[str] = set()
        self._lock = threading.Lock()

    def label(self, key_number: int, salt: str | None) -> str:
        """Return the label of the key `key_number` (from 1, 0 for none) together with a salt.

        A salt that finds no label left counts as its key alone, or as OTHER; keys above MAX_KEYS are OTHER.
        """
        if key_number > MAX_KEYS:
            return OTHER
        key = f"key-{key_number}" if key_number else UNLABELLED
        if salt is None:
            return key
        return self._registered(f"{key} salt-{_digest(salt)}".lstrip()) or key or OTHER

    def _registered(self, label: str) -> str | None:
        """Return the label if it has a place."""
        with self._lock:
            if len(self._salted) < MAX_SALTS:
                self._salted.add(label)
            return label if label in self._salted else None


def _digest(salt: str) -> str:
    """Return the beginning of a salt's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(salt.encode()).hexdigest()[:_DIGEST_CHARS]
