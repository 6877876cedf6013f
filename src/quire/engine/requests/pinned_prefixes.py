"""Pinned prefixes of an engine by their public ids.

The engine knows a pin by the number of the request that computed it. Public ids are random, so that no client unpins a
prefix of another one by accident or by guessing.
"""

import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from quire.cache.block_table import blocks_for
from quire.core.checks import shown
from quire.core.errors import UnknownPrefixError
from quire.core.outputs import PinnedPrefix
from quire.core.sequence import Request


class ClientPin(NamedTuple):
    """A pinned prefix, the number of its request, and that of its API key: from 1, 0 for none, or the operator's."""

    prefix: PinnedPrefix
    request_id: int
    key_number: int


class PinnedPrefixes:
    """Pins that were computed and not yet unpinned, in the order of pinning."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pinned: dict[str, ClientPin] = {}
        self._on_removal: dict[str, Callable[[], None]] = {}
        self.request_ids = itertools.count(-1, -1)  # negative: seeds derive from the ids of requests, from 0 up

    def __len__(self) -> int:
        return len(self._pinned)

    def __contains__(self, prefix_id: str) -> bool:
        """Return whether a prefix is pinned."""
        return prefix_id in self._pinned

    def of_key(self, key_number: int | None) -> Iterator[ClientPin]:
        """Yield the pins of an API key, numbered from 1; 0: those without a key; None: all."""
        return (pin for pin in self._pinned.values() if key_number in (None, pin.key_number))

    def num_blocks(self, key_number: int | None) -> int:
        """Return how many blocks the pins of a key have; one that two pins share counts twice. None: of all keys."""
        return sum(pin.prefix.num_blocks for pin in self.of_key(key_number))

    def add(self, request: Request, key_number: int = 0, ttl_s: float | None = None) -> PinnedPrefix:
        """Add a prefix that a request has computed. `ttl_s`: the caller removes it after that."""
        num_tokens, now_s = len(request.prompt_token_ids), time.time()
        num_blocks = blocks_for(num_tokens, self._block_size)
        expires = None if ttl_s is None else math.ceil(now_s + ttl_s)
        prefix = PinnedPrefix(f"prefix-{uuid.uuid4().hex}", num_tokens, num_blocks, int(now_s), expires)
        self._pinned[prefix.id] = ClientPin(prefix, request.request_id, key_number)
        return prefix

    def remaining_s(self, prefix_id: str) -> float:
        """Return the seconds until a pinned prefix expires, to a second; infinity if it does not."""
        expires = self._pinned[prefix_id].prefix.expires
        return math.inf if expires is None else expires - time.time()

    def renew(self, prefix_id: str, ttl_s: float) -> None:
        """Let a prefix that is pinned expire after `ttl_s` from now; the caller removes it then."""
        pin = self._pinned[prefix_id]
        self._pinned[prefix_id] = pin._replace(prefix=replace(pin.prefix, expires=_in_seconds(ttl_s)))

    def on_removal(self, prefix_id: str, call: Callable[[], None]) -> None:
        """Call a function when a prefix is removed, or when another function takes its place."""
        self._on_removal.pop(prefix_id, lambda: None)()
        self._on_removal[prefix_id] = call

    def remove(self, prefix_id: str, key_number: int | None = 0) -> int:
        """Remove a prefix and return the number of its request. UnknownPrefixError if the key has none of that id.

        `key_number` None: of any key.
        """
        found = self._pinned.get(prefix_id) if isinstance(prefix_id, str) else None
        if found is None or key_number not in (None, found.key_number):
            raise UnknownPrefixError(f"there is no pinned prefix {shown(prefix_id)}")
        del self._pinned[prefix_id]
        self._on_removal.pop(prefix_id, lambda: None)()
        return found.request_id

    def clear(self) -> None:
        """Remove all prefixes: the cache that had them is gone."""
        for prefix_id in [*self._pinned]:
            self.remove(prefix_id, None)


def _in_seconds(ttl_s: float) -> int:
    """Return the time after `ttl_s`, in whole seconds since 1970."""
    return math.ceil(time.time() + ttl_s)
