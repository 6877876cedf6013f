"""Reasons why the prefix cache had no more of the prompts of a call.

One pass over the tokens that the owner's calls have computed answers for all prompts at once: prefixes are compared by
a hash that grows block by block, so the cost is linear in the history, however many prompts ask and however alike they
are. The pass is in slices, because a history may take a tenth of a second. Other owners' requests are never looked at.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.server.time_slices import MAX_SLICE_UNITS
from quire.server.watch.history import History, Miss, MissReason, PastRequest

_NEVER_S = math.inf
_Key = tuple[int, bytes]  # hash of the full blocks of a prefix, and its tokens behind them


@dataclass(slots=True)
class _Sighting:
    """When requests first began to answer that had computed a prefix: with the salt of the call, and with others."""

    same_salt_s: float = _NEVER_S
    other_salt_s: float = _NEVER_S


def explain_misses(history: History, requests: Sequence[PastRequest], block_size: int) -> "MissSearch":
    """Return the search for the misses of a call's requests, all of one key and one salt."""
    return MissSearch(requests, history.comparable(requests[0].prompt), block_size)


class MissSearch:
    """Finds out why the cache missed. `run` it to its end before reading `miss`."""

    def __init__(
        self, requests: Sequence[PastRequest], calls: Sequence[Sequence[PastRequest]], block_size: int
    ) -> None:
        self._requests, self._calls, self._block_size = requests, calls, block_size
        self._block_bytes = 4 * block_size
        self._keys: dict[int, _Key] = {}                     # by the number of the request
        self._sightings: dict[_Key, _Sighting] = {}
        self._remainders: dict[int, set[int]] = {}           # bytes behind so many full blocks, of wanted prefixes

    def run(self) -> Iterator[None]:
        """Search, and yield after each slice of work."""
        num_units = 0
        for work in (self._index(), self._look()):
            for units in work:
                num_units += units
                if num_units >= MAX_SLICE_UNITS:
                    num_units = 0
                    yield

    def miss(self, number: int) -> Miss | None:
        """Return where the cache had no more of a prompt; None if it had all, or was not looked in."""
        key = self._keys.get(number)
        if key is None:
            return None
        metrics, seen = self._requests[number].metrics, self._sightings[key]
        assert metrics.first_scheduled_s is not None, "looked for before it ran"
        reason: MissReason = "never_seen"
        if seen.same_salt_s < metrics.first_scheduled_s:
            reason = "evicted"
        elif seen.other_salt_s < metrics.first_scheduled_s:
            reason = "other_salt"
        return Miss(metrics.num_cached_tokens, metrics.num_cached_tokens // self._block_size, reason)

    def _index(self) -> Iterator[int]:
        """Note the prefixes that were missed, each up to its first token that was not found; yield units of work."""
        for number, request in enumerate(self._requests):
            num_found = request.metrics.num_cached_tokens
            has_run = request.metrics.first_scheduled_s is not None
            yield 1
            if not request.reads_cache or not has_run or num_found >= request.num_prompt_tokens - 1:
                continue  # the last token is always computed
            num_blocks = num_found // self._block_size
            hashed = 0
            for block in range(num_blocks):
                hashed = hash((hashed, self._block(request.prompt_tokens, block)))
                yield 1
            rest = request.prompt_tokens[num_blocks * self._block_bytes : 4 * (num_found + 1)]
            self._keys[number] = key = hashed, rest
            self._sightings.setdefault(key, _Sighting())
            self._remainders.setdefault(num_blocks, set()).add(len(rest))

    def _look(self) -> Iterator[int]:
        """Look for the prefixes in all that was computed; yield units of work."""
        if not self._keys:
            return
        salt = self._requests[0].prompt.cache_salt
        for requests in self._calls:
            for past in requests:
                yield 1
                if past.metrics.first_token_s is not None:
                    yield from self._look_in(past, past.metrics.first_token_s, past.prompt.cache_salt == salt)

    def _look_in(self, past: PastRequest, began_s: float, has_same_salt: bool) -> Iterator[int]:
        """Look through a prompt, and from its last full block on through each answer but for its last token."""
        num_prompt_blocks = len(past.prompt_tokens) // self._block_bytes
        begin = num_prompt_blocks * self._block_bytes
        hashed = 0
        for block in range(num_prompt_blocks):
            hashed = self._look_at(past.prompt_tokens, block, block, hashed, began_s, has_same_salt)
            yield 1
        for answer in list(past.branches.values()):
            tail = past.prompt_tokens[begin:] + memoryview(answer)[:-1].tobytes()
            branch_hash = hashed
            for block in range(len(tail) // self._block_bytes):
                branch_hash = self._look_at(tail, block, num_prompt_blocks + block, branch_hash, began_s, has_same_salt)
                yield 1

    def _look_at(
        self, tokens: bytes, block: int, num_before: int, hashed: int, began_s: float, has_same_salt: bool
    ) -> int:
        """Compare a full block, with `num_before` of the same hash chain before it; return the hash with it."""
        content = self._block(tokens, block)
        for num_bytes in self._remainders.get(num_before, ()):
            seen = self._sightings.get((hashed, content[:num_bytes]))
            if seen is not None and has_same_salt:
                seen.same_salt_s = min(seen.same_salt_s, began_s)
            elif seen is not None:
                seen.other_salt_s = min(seen.other_salt_s, began_s)
        return hash((hashed, content))

    def _block(self, tokens: bytes, block: int) -> bytes:
        return tokens[block * self._block_bytes : (block + 1) * self._block_bytes]

