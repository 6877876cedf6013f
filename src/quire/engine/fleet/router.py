"""Routing of requests to engines: the rules, and what a server knows of each engine's work and cached prefixes.

The server and the simulator use the same router, fed with the same reports. It has no clock and does no I/O.

Full blocks of tokens in the engine's own tree (`PrefixTree`), so that a match is exact to the token and never crosses a
scope. The index has as many nodes as the engine has blocks, and evicts as the engine does: leaves first, of those the
least recently used. An engine reports how many blocks it has evicted, not which, so the index is an estimate.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from quire.cache.prefix_tree import PrefixTree, as_bytes
from quire.core.deltas import Admission, SequenceDelta, WaitReason
from quire.core.errors import ConfigError
from quire.core.images import cache_keys
from quire.core.pooling import Scope
from quire.core.sequence import Request
from quire.core.token_ids import PackedTokens


class PrefixIndex:
    """Prefixes of one engine, in blocks of `block_size` tokens, at most `num_blocks`.

    A sequence uses all nodes of its path, so a node is used at least as recently as its children, and the order of the
    last uses, children first, is the order of eviction.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tree = PrefixTree(num_blocks, block_size)
        self._order = OrderedDict[int, None]()  # all nodes, the least recently used first
        self._free = list(range(num_blocks))
        self._num_evicted = 0

    def __len__(self) -> int:
        """Count the blocks in the index."""
        return len(self._tree)

    def match(self, scope: Scope, token_ids: Sequence[int]) -> int:
        """Return how many of the first tokens the engine has in its cache, in full blocks. Changes nothing."""
        return self._block_size * len(self.find(scope, token_ids))

    def find(self, scope: Scope, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks of what `match` counts."""
        return list(self._tree.walk(scope, token_ids, len(token_ids)))

    def add(self, scope: Scope, token_ids: Sequence[int], path: list[int] | None = None) -> None:
        """Add the full blocks of a sequence that the engine computes, as the most recently used.

        `path`: what `find` returns of it, if that is known; it may be extended.
        """
        path = self.find(scope, token_ids) if path is None else path
        self._use(path)
        if len(path) < len(token_ids) // self._block_size:
            self._extend(path, scope, token_ids)

    def _use(self, path: Sequence[int]) -> None:
        for block in reversed(path):             # the last block of a sequence is evicted before the first
            self._order.move_to_end(block)

    def _extend(self, path: list[int], scope: Scope, token_ids: Sequence[int]) -> None:
        """Add the blocks behind a path that has just been used, as far as there is room without evicting the path."""
        tree, packed, num_found = self._tree, as_bytes(token_ids), len(path)
        num_missing = len(token_ids) // self._block_size - num_found
        while len(self._free) < num_missing and len(self._order) > num_found:
            self._evict_one()
        for index in range(num_found, num_found + min(num_missing, len(self._free))):
            node = path[-1] if path else tree.open_root(scope)
            tree.insert(node, tree.key_at(node, packed, index), block := self._free.pop())
            path.append(block)
        self._order.update(dict.fromkeys(reversed(path[num_found:])))
        self._use(path[:num_found])

    def evict(self, num_evicted: int) -> None:
        """Evict until the index has evicted as many blocks as the engine has since its start: `num_evicted`.

        What the index had to evict for want of room counts: the engine evicts for the same requests, later.
        """
        while self._num_evicted < num_evicted and self._order:
            self._evict_one()
        self._num_evicted = max(self._num_evicted, num_evicted)

    def _evict_one(self) -> None:
        """Evict the least recently used node, a leaf."""
        block, _ = self._order.popitem(last=False)
        self._tree.remove(block)
        self._free.append(block)
        self._num_evicted += 1

    def check(self) -> None:
        """Assert that each block is either free or a node, and that children are evicted before their parents."""
        self._tree.check()
        held = sorted([*self._order, *self._free])
        assert held == list(range(len(held))), "a block is free and a node, or neither"
        assert len(self._tree) == len(self._order), f"{len(self._tree)} nodes, {len(self._order)} in the order"
        places = {block: place for place, block in enumerate(self._order)}
        late = [block for block in places if places.get(self._tree.parent(block), len(places)) < places[block]]
        assert not late, f"nodes {late} are evicted after their parents"


Routing = Literal["prefix", "round-robin", "affinity"]

# Weight of a cached token against a pending one. With 1, a hot prefix is computed again on every engine that is less
# busy by its length, and the copies evict other prefixes: docs/decisions/0023 has the figures.
CACHED_TOKEN_WEIGHT = 4

NO_ROOM: frozenset[WaitReason | None] = frozenset({"max_num_seqs", "kv_blocks", "swapped_first"})


@dataclass(slots=True)
class _Routed:
    """A request that was sent to an engine and has not ended there."""

    prompt: PackedTokens
    scope: Scope
    num_pending: int                    # prompt tokens that the engine has to compute before the first output token
    num_open: int                       # branches that have not ended
    output: "array[int]" = field(default_factory=lambda: array("i"))  # tokens of the first branch


@dataclass(slots=True)
class _Engine:
    """State of an engine, as the router knows it."""

    index: PrefixIndex
    requests: dict[int, _Routed] = field(default_factory=dict)
    num_pending: int = 0                # sum over its requests
    num_seqs: int = 0                   # open branches, sum over its requests
    num_used_blocks: int = 0            # as last reported, like the next field
    has_no_room: bool = False           # requests wait there for rows or blocks
    num_routed_tokens: int = 0          # prompt tokens that were expected to be computed there, since its start


class Router:
    """Chooses an engine for each request. Engines are numbered from 0; `num_blocks` are the sizes of their caches.

    `max_num_seqs`: rows of each engine.
    """

    def __init__(
        self, num_blocks: Sequence[int], block_size: int, max_num_seqs: int, routing: Routing = "prefix"
    ) -> None:
        if routing not in get_args(Routing):
            raise ConfigError(f"routing must be one of {', '.join(get_args(Routing))}, got {routing!r}")
        self._routing, self._num_blocks, self._block_size = routing, num_blocks, block_size
        self._max_num_seqs = max_num_seqs
        self._engines = [self._new_engine(number) for number in range(len(num_blocks))]
        self._num_routed = 0
        self._engine_of: dict[int, int] = {}            # keyed by the number of the request

    def route(self, request: Request, engines: Collection[int] | None = None) -> int:
        """Return the engine for a request, which counts as its work from now on. `engines`: those that may be chosen.

        By the rule `prefix`, one with rows and blocks for the request, if there is one, else one of those where the
        fewest have to become free first. Of these that with the least work for it: pending tokens plus the request's
        own, less CACHED_TOKEN_WEIGHT times those that the engine has cached; of equals, that with the fewest requests.
        """
        candidates = sorted(range(len(self._engines)) if engines is None else engines)
        scope, prompt = request.scope, _keys(request)
        if self._routing == "round-robin":
            chosen = candidates[self._num_routed % len(candidates)]
            found = self._engines[chosen].index.find(scope, prompt)
        else:
            paths = {number: self._engines[number].index.find(scope, prompt) for number in candidates}
            cached = {number: len(path) * self._block_size for number, path in paths.items()}
            chosen = min(candidates, key=lambda number: self._work(number, request, cached[number]))
            found = paths[chosen]
        self._num_routed += 1
        self._assign(request, chosen, found)
        return chosen

    def rank(self, request: Request, engines: Collection[int]) -> list[int]:
        """Return engines in the order of the rule `prefix`, the first for a request first. Changes nothing."""
        scope, prompt = request.scope, _keys(request)
        cached = {number: self._engines[number].index.match(scope, prompt) for number in engines}
        return sorted(engines, key=lambda number: self._work(number, request, cached[number]))

    def num_cached(self, request: Request, number: int) -> int:
        """Return the tokens of a request's prompt that an engine is expected to have in its cache."""
        return self._engines[number].index.match(request.scope, _keys(request))

    def assign(self, request: Request, number: int) -> None:
        """Count a request as the work of an engine from now on; once for each request."""
        self._num_routed += 1
        self._assign(request, number, self._engines[number].index.find(request.scope, _keys(request)))

    def engine_of(self, request_id: int) -> int | None:
        """Return the engine of a request that has not ended."""
        return self._engine_of.get(request_id)

    @property
    def num_engines(self) -> int:
        """Engines, by which all numbers are below."""
        return len(self._engines)

    def _work(self, number: int, request: Request, num_cached: int) -> tuple[int, ...]:
        """Return the sort key of an engine for a request; `affinity` goes by the cached tokens first."""
        engine, num_tokens = self._engines[number], len(request.prompt_token_ids)
        work = engine.num_pending + num_tokens
        load = len(engine.requests), engine.num_routed_tokens, number
        if self._routing == "affinity":
            return -num_cached, work, *load
        rounds = self._num_rounds(number, request.params.n, num_tokens - num_cached)
        return rounds, work - CACHED_TOKEN_WEIGHT * num_cached, *load

    def _num_rounds(self, number: int, num_seqs: int, num_new_tokens: int) -> int:
        """Return how many times an engine's rows, or blocks, have to become free before a request gets some of them.

        0 if there are rows and blocks for it besides all that the engine has been sent.
        """
        engine, num_blocks = self._engines[number], self._num_blocks[number]
        num_new_blocks = (engine.num_pending + num_new_tokens) // self._block_size + num_seqs
        of_rows = (engine.num_seqs + num_seqs - 1) // self._max_num_seqs
        of_blocks = (engine.num_used_blocks + num_new_blocks - 1) // max(1, num_blocks)
        return max(engine.has_no_room, of_rows, of_blocks)

    def _assign(self, request: Request, number: int, found: list[int]) -> None:
        """Count a request as the work of an engine; `found`: the blocks of its prompt that the engine's index has."""
        engine, prompt = self._engines[number], _keys(request)
        num_pending = max(1, len(prompt) - len(found) * self._block_size)
        engine.requests[request.request_id] = _Routed(prompt, request.scope, num_pending, request.params.n)
        engine.num_pending += num_pending
        engine.num_seqs += request.params.n
        engine.num_routed_tokens += num_pending
        engine.index.add(request.scope, prompt, found)
        self._engine_of[request.request_id] = number

    # --- reports of engines -----------------------------------------------------------------------------------------

    def on_step(
        self, number: int, admissions: Iterable[Admission], deltas: Iterable[SequenceDelta], num_evicted: int,
        num_used_blocks: int = 0, waits_for: WaitReason | None = None,
    ) -> None:  # fmt: skip
        """Record a step of an engine, or that it is idle. `num_evicted`: blocks that it has evicted since its start.

        `num_used_blocks`, `waits_for`: its blocks in use, and why its next request waits.
        """
        engine = self._engines[number]
        engine.index.evict(num_evicted)
        engine.num_used_blocks, engine.has_no_room = num_used_blocks, waits_for in NO_ROOM
        for admission in admissions:
            routed = engine.requests.get(admission.request_id)
            if routed is not None and not admission.num_preemptions:
                self._correct(engine, routed, admission.num_cached_tokens)
        for delta in deltas:
            routed = engine.requests.get(delta.request_id)
            if routed is None:
                continue
            engine.num_pending -= routed.num_pending
            routed.num_pending = 0
            if delta.index == 0:
                routed.output.extend(delta.token_ids)
            if delta.finish_reason is not None or delta.error is not None:
                routed.num_open -= 1
                engine.num_seqs -= 1
                if not routed.num_open or delta.error is not None:
                    self._finish(engine, delta.request_id, routed)

    def _correct(self, engine: _Engine, routed: _Routed, num_cached: int) -> None:
        """Correct what was expected of a request's prompt by what the engine has found in its cache."""
        num_pending = len(routed.prompt) - num_cached
        engine.num_pending += num_pending - routed.num_pending
        routed.num_pending = num_pending

    def _finish(self, engine: _Engine, request_id: int, routed: _Routed) -> None:
        """Forget a request that the engine has finished; its tokens stay in the index, its output too."""
        self.forget(request_id)
        engine.index.add(routed.scope, routed.prompt + routed.output[:-1])  # the last token is never computed

    def forget(self, request_id: int) -> None:
        """Forget a request for which its engine does nothing more. Idempotent."""
        number = self._engine_of.pop(request_id, None)
        if number is not None:
            engine, routed = self._engines[number], self._engines[number].requests.pop(request_id)
            engine.num_pending -= routed.num_pending
            engine.num_seqs -= routed.num_open

    def replace(self, number: int) -> None:
        """Forget all of an engine that has died: its requests, and its cache."""
        for request_id in list(self._engines[number].requests):
            self.forget(request_id)
        num_routed_tokens = min(engine.num_routed_tokens for engine in self._engines)
        self._engines[number] = self._new_engine(number)
        self._engines[number].num_routed_tokens = num_routed_tokens  # else it gets all ties until it has caught up

    def _new_engine(self, number: int) -> _Engine:
        return _Engine(PrefixIndex(self._num_blocks[number], self._block_size))

    @property
    def num_pending(self) -> Sequence[int]:
        """Prompt tokens that each engine has to compute."""
        return [engine.num_pending for engine in self._engines]

    def check(self) -> None:
        """Assert that counts agree with the requests."""
        for number, engine in enumerate(self._engines):
            engine.index.check()
            assert engine.num_pending == sum(routed.num_pending for routed in engine.requests.values())
            assert engine.num_seqs == sum(routed.num_open for routed in engine.requests.values())
            assert all(self._engine_of[request_id] == number for request_id in engine.requests)
        assert len(self._engine_of) == sum(len(engine.requests) for engine in self._engines)


def _keys(request: Request) -> PackedTokens:
    """Return the tokens of a prompt as the prefix caches of engines are told them."""
    return cache_keys(request.prompt_token_ids, request.images) if request.images else request.prompt_token_ids
