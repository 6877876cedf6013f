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
        self._pinned: dict[str, tuple[PinnedPrefix, int]] = {}  # with the number of the request
        self._request_ids = itertools.count(-1, -1)

    def __iter__(self) -> Iterator[PinnedPrefix]:
        """Yield what users know of each."""
        return (prefix for prefix, _ in self._pinned.values())

    def next_request_id(self) -> int:
        """Number a request that is to pin its prompt: below 0, for the seeds of others are drawn from their numbers."""
        return next(self._request_ids)

    def add(self, request: Request) -> PinnedPrefix:
        """Take in a prefix that a request has computed."""
        num_tokens = len(request.prompt_token_ids)
        num_blocks = blocks_for(num_tokens, self._block_size)
        prefix = PinnedPrefix(f"prefix-{uuid.uuid4().hex}", num_tokens, num_blocks, int(time.time()))
        self._pinned[prefix.id] = prefix, request.request_id
        return prefix

    def remove(self, prefix_id: str) -> int:
        """Forget a prefix and return the number of its request. UnknownPrefixError if it is not here."""
        if not isinstance(prefix_id, str) or prefix_id not in self._pinned:
            raise UnknownPrefixError(f"there is no pinned prefix {shown(prefix_id)}")
        _, request_id = self._pinned.pop(prefix_id)
        return request_id
