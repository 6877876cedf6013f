"""The prefixes that the users of an engine have pinned, by the ids that they know.

The engine knows a pin by the number of the request that computed it. Users get a random id, so that nobody unpins by
accident, or by guessing, what another one needs.
"""

import itertools
import time
import uuid
from collections.abc import Iterator

from quire.cache.block_table import blocks_for
from quire.core.checks import shown
from quire.core.errors import UnknownPrefixError
from quire.core.outputs import PinnedPrefix
from quire.core.sequence import Request


class PinnedPrefixes:
    """Each pin that was computed and not yet unpinned, in the order in which they were pinned."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pinned: dict[str, tuple[PinnedPrefix, int, int]] = {}  # with the numbers of the request and of its key
        self.request_ids = itertools.count(-1, -1)  # of those that are to pin: others' seeds come of theirs, from 0 up

    def __len__(self) -> int:
        """Count them."""
        return len(self._pinned)

    def of(self, key_number: int) -> Iterator[PinnedPrefix]:
        """Yield what its owner knows of each that came with this API key, numbered from 1; 0: without one."""
        return (prefix for prefix, _, owner in self._pinned.values() if owner == key_number)

    def add(self, request: Request, key_number: int = 0) -> PinnedPrefix:
        """Take in a prefix that a request has computed."""
        num_tokens = len(request.prompt_token_ids)
        num_blocks = blocks_for(num_tokens, self._block_size)
        prefix = PinnedPrefix(f"prefix-{uuid.uuid4().hex}", num_tokens, num_blocks, int(time.time()))
        self._pinned[prefix.id] = prefix, request.request_id, key_number
        return prefix

    def remove(self, prefix_id: str, key_number: int = 0) -> int:
        """Forget a prefix and return the number of its request. UnknownPrefixError if the key has none of that id."""
        found = self._pinned.get(prefix_id) if isinstance(prefix_id, str) else None
        if found is None or found[2] != key_number:
            raise UnknownPrefixError(f"there is no pinned prefix {shown(prefix_id)}")
        del self._pinned[prefix_id]
        return found[1]
