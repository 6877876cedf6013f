"""Reasons for the prefix cache misses of a call's prompts.

One pass over the tokens that the owner's calls have computed serves all prompts: prefixes are compared by a hash that
is extended block by block, so the cost is linear in the history, whatever the number and likeness of the prompts. The
pass runs in slices, since it may take a tenth of a second. Requests of other owners are never read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.server.history import History, Miss, MissReason, PastRequest
from quire.server.limits.time_slices import MAX_SLICE_UNITS

_NEVER_S = math.inf
_Key = tuple[int, bytes]  # hash of the full blocks of a prefix, and its tokens behind them


@dataclass(slots=True)
class _Sighting:
    """First time at which a prefix had been computed: with the salt of the call, by engine, and with other salts."""

    same_salt_s: dict[int, float] = field(default_factory=dict)
    other_salt_s: float = _NEVER_S


def explain_misses(history: History, requests: Sequence[PastRequest], block_size: int) -> "MissSearch":
    """Return the search for the misses of a call's requests, all of one key and one salt."""
    return MissSearch(requests, history.comparable(requests[0].prompt), block_size)


class MissSearch:
    """Search for the reasons of misses. `run` it to its end before reading `miss`."""

    def __init__(
        self, requests: Sequence[PastRequest], calls: Sequence[Sequence[PastRequest]], block_size: int
    ) -> None:
        self._requests, self._calls, self._block_size = requests, calls, block_size
        self._block_bytes = 4 * block_size
        self._keys: dict[int, _Key] = {}                     # by the number of the request
        self._sightings: dict[_Key, _Sighting] = {}
        self._remainders: dict[int, set[int]] = {}           # by full blocks: bytes of wanted prefixes behind them

    def run(self) -> Iterator[None]:
        """Search, and yield after each slice of work."""
        num_units = 0
        for work in (self._index(), self._search()):
            for units in work:
                num_units += units
                if num_units >= MAX_SLICE_UNITS:
                    num_units = 0
                    yield

    def miss(self, number: int) -> Miss | None:
        """Return the first miss of a prompt; None if the cache had all of it, or was not searched."""
        key = self._keys.get(number)
        if key is None:
            return None
        metrics, seen = self._requests[number].metrics, self._sightings[key]
        assert metrics.first_scheduled_s is not None, "searched before it ran"
        reason: MissReason = "never_seen"
        if seen.same_salt_s.get(metrics.engine, _NEVER_S) < metrics.first_scheduled_s:
            reason = "evicted"
        elif min(seen.same_salt_s.values(), default=_NEVER_S) < metrics.first_scheduled_s:
            reason = "other_engine"
        elif seen.other_salt_s < metrics.first_scheduled_s:
            reason = "other_salt"
        return Miss(metrics.num_cached_tokens, metrics.num_cached_tokens // self._block_size, reason)

    def _index(self) -> Iterator[int]:
        """Index the missed prefixes, each up to the first token that was not found; yield units of work."""
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

    def _search(self) -> Iterator[int]:
        """Search the computed tokens for the prefixes; yield units of work."""
        if not self._keys:
            return
        salt = self._requests[0].prompt.cache_salt
        for requests in self._calls:
            for past in requests:
                yield 1
                if past.metrics.first_token_s is not None:
                    engine = past.metrics.engine if past.prompt.cache_salt == salt else None
                    yield from self._search_request(past, past.metrics.first_token_s, engine)

    def _search_request(self, past: PastRequest, started_s: float, engine: int | None) -> Iterator[int]:
        """Search a prompt, and from its last full block on each branch except its last token.

        `engine`: that has computed it with the salt of the call; None: with another salt.
        """
        num_prompt_blocks = len(past.prompt_tokens) // self._block_bytes
        begin = num_prompt_blocks * self._block_bytes
        hashed = 0
        for block in range(num_prompt_blocks):
            hashed = self._compare_block(past.prompt_tokens, block, block, hashed, started_s, engine)
            yield 1
        for answer in list(past.branches.values()):
            tail = past.prompt_tokens[begin:] + memoryview(answer)[:-1].tobytes()
            branch_hash = hashed
            for block in range(len(tail) // self._block_bytes):
                num_before = num_prompt_blocks + block
                branch_hash = self._compare_block(tail, block, num_before, branch_hash, started_s, engine)
                yield 1

    def _compare_block(
        self, tokens: bytes, block: int, num_before: int, hashed: int, started_s: float, engine: int | None
    ) -> int:
        """Compare a full block, with `num_before` of the same hash chain before it; return the hash with it."""
        content = self._block(tokens, block)
        for num_bytes in self._remainders.get(num_before, ()):
            seen = self._sightings.get((hashed, content[:num_bytes]))
            if seen is not None and engine is not None:
                seen.same_salt_s[engine] = min(seen.same_salt_s.get(engine, _NEVER_S), started_s)
            elif seen is not None:
                seen.other_salt_s = min(seen.other_salt_s, started_s)
        return hash((hashed, content))

    def _block(self, tokens: bytes, block: int) -> bytes:
        return tokens[block * self._block_bytes : (block + 1) * self._block_bytes]

