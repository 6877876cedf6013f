"""Labels of the owners of requests, for figures that people see: an API key by its number, a salt by a digest.

Neither keys nor salts can be read from a label. There is a bounded number of labels, since metrics keep each that
they have ever seen: a client that sends salt after salt gets no more of them.
"""

import hashlib
import threading

MAX_LABELS = 32      # keys, and as many salts under all keys and none together, by first appearance
OTHER = "other"
OPERATOR = -1        # the number of the operator's key
UNLABELLED = ""      # came without a key, and without a salt

_DIGEST_CHARS = 8


class OwnerLabels:
    """Gives labels, always the same one to the same owner. For any thread."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._salted: set[str] = set()
        self._lock = threading.Lock()

    def label(self, key_number: int, salt: str | None) -> str:
        """Return the label of the key `key_number` (from 1, 0 for none, OPERATOR) together with a salt.

        A salt that finds no label left counts as its key alone, or as OTHER; so are keys above `max_labels`.
        """
        if key_number > self._max_labels:
            return OTHER
        key = "operator" if key_number == OPERATOR else f"key-{key_number}" if key_number else UNLABELLED
        if salt is None:
            return key
        digest = hashlib.sha256(salt.encode()).hexdigest()[:_DIGEST_CHARS]
        label = f"{key} salt-{digest}".lstrip()
        with self._lock:
            if len(self._salted) < self._max_labels:
                self._salted.add(label)
            return label if label in self._salted else key or OTHER
