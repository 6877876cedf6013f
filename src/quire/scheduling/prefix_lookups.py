"""Lookups of cached prefixes for waiting requests, each repeated no more than needed.

A request whose prefix is being computed by another waits for many steps: its match is followed from step to step
instead of walking the prefix tree from the root. A burst of requests with a common prefix is admitted one after the
other: each looks into the blocks of the one before it first.
"""

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import Awaited, PrefixMatch
from quire.core.sequence import Request, Sequence
from quire.scheduling.admission_work import AdmissionWork


class PrefixLookups:
    """Pending matches of the last step and of this one by request id, and the sequence that began last."""

    def __init__(self, cache: KVCacheManager, work: AdmissionWork) -> None:
        self._cache, self._work = cache, work
        self._awaited: dict[int, Awaited] = {}
        self._awaited_before: dict[int, Awaited] = {}
        self._last_begun: int | None = None     # its sequence id

    def start_step(self) -> None:
        """Begin a step: requests that were not looked up in the last one have ended, or have been admitted."""
        self._awaited_before, self._awaited = self._awaited, {}

    def record_started(self, sequence: Sequence) -> None:
        """Note a sequence that has a block table now: the next request may begin with the same tokens."""
        self._last_begun = sequence.seq_id

    def match_first(self, request: Request, stop: int) -> PrefixMatch:
        """Look up the first `stop` tokens of a waiting request's first branch."""
        request_id, sequence = request.request_id, request.live[0]
        awaited = self._awaited.get(request_id) or self._awaited_before.get(request_id)
        if awaited is not None:
            awaited = self._cache.still_awaits(awaited, sequence.token_ids)
        if awaited is not None:
            self._work.count_refreshed()
            match = PrefixMatch(awaited=awaited)
        else:
            match = self.match(request, sequence, stop)
        if match.awaited is not None:
            self._awaited[request_id] = match.awaited
        return match

    def match(self, request: Request, sequence: Sequence, stop: int) -> PrefixMatch:
        """Look up the first `stop` tokens of any branch."""
        match = self._cache.match(sequence.token_ids, stop, request.cache_salt, self._last_begun)
        self._work.count_lookup(match)
        return match
