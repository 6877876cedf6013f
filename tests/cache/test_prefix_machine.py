"""Random lives of sequences that find each other's prefixes: match, adopt, pend, fork, pin, evict, swap, fail.

Each slot of the memory holds a digest of all tokens up to it, and of the scope. A step collects swaps, copies and
writes, and does them at its end, from tables that were built of updates alone, as a worker's are. So one look at every
position shows a block that was shared wrongly, given up too early, written twice or never. A step that fails leaves
garbage in all that it was to write, in the swap space too.

As in the test of the cache without prefixes, hypothesis searches in the default run, and the
long one draws from seeds (support/fuzz_seeds.py).
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK
from quire.cache.prefix_tree import Awaited, PrefixMatch
from quire.core.config import CacheConfig
from quire.core.kv_events import KVEventsConfig
from quire.core.plan import BlockCopy
from quire.core.pooling import Scope
from quire.scheduling.scheduler import make_cache
from support.event_reader import EventReader, findable
from support.fuzz_seeds import STEPS_PER_RUN, fuzz

MAX_SEQUENCES = 6
MAX_PINS = 4
GARBAGE = -1
SCOPES = (None, Scope("salt"))

Choose = Callable[[int], int]  # a number below the one given


@dataclass
class Live:
    """A sequence as its owner knows it, its table as the worker sees it, and its part in the step under way."""

    tokens: list[int]
    scope: Scope | None
    worker_table: list[int]
    num_computed: int           # written by steps that have succeeded
    is_in_step: bool = False    # the step copies or writes for it
    has_appended: bool = False
    copies: list[BlockCopy] = field(default_factory=list)
    writes: range = range(0)    # positions
    writer: "Live | None" = None  # sequence that it has forked from, and shares the writes of this step with
    has_begun_in_step: bool = False  # with a copy, or with what another computes

    def leave_step(self) -> None:
        """Take no part in the step, or no more."""
        self.is_in_step = self.has_appended = self.has_begun_in_step = False
        self.copies, self.writes, self.writer = [], range(0), None


@dataclass
class Pinned:
    """A prefix as it was when it was pinned, and the blocks that it held then."""

    tokens: list[int]
    scope: Scope | None
    table: list[int]


class World:
    """The real cache, a memory, and what sequences are owed."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None, num_swap_blocks: int) -> None:
        self.cache = make_cache(
            CacheConfig(num_blocks, block_size, window, True, num_swap_blocks, kv_events=KVEventsConfig())
        )
        self.reader = EventReader()
        self.num_blocks, self.block_size, self.window = num_blocks, block_size, window
        self.num_swap_blocks = num_swap_blocks
        self.live: dict[int, Live] = {}
        self.swapped: dict[int, Live] = {}     # planned in the step under way if they go out in it
        self.swap_outs: list[BlockCopy] = []   # pending in the step under way
        self.swap_ins: list[BlockCopy] = []
        self.memory: dict[tuple[int, int], int] = {}
        self.swap_memory: dict[tuple[int, int], int] = {}
        self.pinned: dict[int, Pinned] = {}
        self.known: list[list[int]] = [[]]  # tokens of all sequences so far
        self.awaiting: list[tuple[list[int], Scope | None, Awaited]] = []  # sequences that wait for what others compute
        self.new_ids = count()
        self.seen: Counter[str] = Counter()

    # --- verbs ----------------------------------------------------------------------------------------------------

    def begin(self, choose: Choose) -> None:
        """Begin like another sequence, for a while, with what is found of that."""
        model = self.known[-1 - choose(len(self.known))]
        tokens = model[: choose(len(model) + 1)] + [choose(2) for _ in range(1 + choose(6))]
        scope, seq_id = SCOPES[choose(5) == 0], next(self.new_ids)
        match = self.cache.match(tokens, len(tokens), scope)
        self._check_match(match, tokens, scope)
        if match.awaited is not None and choose(3):
            self.awaiting.append((tokens, scope, match.awaited))
            return
        copy = self.cache.create(seq_id, tokens, scope, match, keeps_all=choose(4) == 0)
        assert self.cache.num_tokens(seq_id) == match.num_tokens - (0 if copy else match.num_inside)
        begun = Live(tokens, scope, self.cache.block_ids(seq_id), match.num_tokens - match.num_inside)
        if copy is not None:
            begun.is_in_step, begun.has_begun_in_step, begun.copies = True, True, [copy]
        self.live[seq_id] = begun
        self.known.append(tokens)
        self.seen.update(found=match.num_tokens > 0, inside=copy is not None, pending=match.is_pending)

    def append(self, seq_id: int, num_wanted: int) -> None:
        """Append up to so many known tokens, or one new one; once in a step."""
        sequence, before = self.live[seq_id], self.cache.num_tokens(seq_id)
        if sequence.has_appended:
            return
        if before == len(sequence.tokens):
            sequence.tokens.append(num_wanted % 2)
        num_new = min(1 + num_wanted, len(sequence.tokens) - before)
        try:
            update = self.cache.append(seq_id, num_new)
        except OutOfBlocksError:
            assert self.cache.num_tokens(seq_id) == before
            most = -(-(before + num_new) // self.block_size) - len(self.cache.block_ids(seq_id)) + 1
            assert self.cache.num_free_blocks < most
            self.seen["full"] += 1
            return
        sequence.is_in_step = sequence.has_appended = True
        if update is not None:
            self.seen.update(adopted=update.first_column < before // self.block_size, stored=update.is_stored)
            sequence.worker_table[update.first_column :] = update.blocks
            sequence.copies += [] if update.copy is None else [update.copy]
        if update is None or not update.is_stored:
            sequence.writes = range(before, before + num_new)

    def publish(self) -> None:
        """Let everything be found, at the beginning of a step."""
        if not any(sequence.is_in_step for sequence in self.live.values()):
            self.cache.publish()
            for seq_id, sequence in self.live.items():
                self._check_is_found(sequence, self.cache.num_tokens(seq_id))

    def fork(self, parent_id: int) -> None:
        """Fork what has been computed, or what has been appended in this step."""
        parent, child_id = self.live[parent_id], next(self.new_ids)
        if parent.is_in_step and not parent.has_appended:
            return
        tokens = parent.tokens.copy()
        self.cache.fork(parent_id, child_id, tokens)
        self.live[child_id] = Live(
            tokens, parent.scope, self.cache.block_ids(child_id), 0 if parent.is_in_step else parent.num_computed,
            is_in_step=parent.is_in_step, has_appended=parent.is_in_step, has_begun_in_step=parent.is_in_step,
            writer=(parent.writer or parent) if parent.is_in_step else None,
        )
        self.known.append(tokens)

    def refork(self, parent_id: int, child_id: int) -> None:
        """Let a beam be replaced by a fork of another, between two steps."""
        if parent_id == child_id or any(each.is_in_step for each in self.live.values()):
            return
        parent, tokens = self.live[parent_id], self.live[parent_id].tokens.copy()
        self.cache.refork(parent_id, child_id, tokens)
        table = self.cache.block_ids(child_id)
        assert table == self.cache.block_ids(parent_id) == self.cache.block_array(child_id).tolist()
        self.live[child_id] = Live(tokens, parent.scope, table, parent.num_computed)
        self.known.append(tokens)
        self.seen["reforked"] += 1

    def pin(self, seq_id: int) -> None:
        """Pin a sequence that has computed all that it was given, and has not let go of anything."""
        sequence, table = self.live[seq_id], self.cache.block_ids(seq_id)
        is_between_steps = not any(each.is_in_step for each in self.live.values())
        num_tokens = self.cache.num_tokens(seq_id)
        if not is_between_steps or num_tokens == 0 or num_tokens < sequence.num_computed or NULL_BLOCK in table:
            return
        if self.cache._tables[seq_id].num_filled > num_tokens:
            return  # its last token is to be computed again
        pin_id = next(self.new_ids)
        self.cache.pin(pin_id, seq_id)
        table = self.cache.pins[pin_id].table.blocks
        self.pinned[pin_id] = Pinned(sequence.tokens[:num_tokens], sequence.scope, table.copy())
        self.seen.update(pinned=True, tail=num_tokens % self.block_size > 0)

    def unpin_one(self, pin_id: int) -> None:
        """Unpin, unless a sequence that went on behind its pin has just copied a block of it. What is found is held."""
        sources = {copy.src for sequence in self.live.values() for copy in sequence.copies}
        if (sources - set(self.cache._sources)).isdisjoint(self.pinned[pin_id].table):
            self.unpin(pin_id)

    def unpin(self, pin_id: int) -> None:
        """Let a pin go; between two steps, all of its full blocks are found as long as none is taken."""
        pinned = self.pinned.pop(pin_id)
        assert self.cache.pins.unpin(pin_id)
        assert not self.cache.pins.unpin(pin_id)
        num_full = len(pinned.tokens) // self.block_size
        assert len(self.cache.match(pinned.tokens, len(pinned.tokens), pinned.scope).blocks) == num_full

    def end_one(self, seq_id: int) -> None:
        """End a sequence, unless the step copies a block that it holds for another, or swaps it in.

        The first two are preempted together, the last is not preempted in that step.
        """
        if not self._is_copied(seq_id) and not self._swap_in_pending(seq_id):
            self.free(seq_id)

    def _swap_in_pending(self, seq_id: int) -> bool:
        path = self.cache._tables[seq_id].path
        return path is not None and path.swap_in_pending

    def _is_copied(self, seq_id: int) -> bool:
        sources = {copy.src for sequence in self.live.values() for copy in sequence.copies}
        return not sources.isdisjoint(self.cache.block_ids(seq_id))

    def retract(self) -> None:
        """Take back what was appended in this step, unless another sequence has begun with a part of it."""
        if any(sequence.has_begun_in_step for sequence in self.live.values()):
            return
        for seq_id, sequence in self.live.items():
            if sequence.has_appended:
                self.cache.retract(seq_id, sequence.num_computed)
                self.seen.update(retracted=True, copy_retracted=bool(sequence.copies))
                sequence.worker_table = self.cache.block_ids(seq_id)
                swap_in_pending = self._swap_in_pending(seq_id)
                sequence.leave_step()
                sequence.is_in_step = swap_in_pending

    def truncate(self, seq_id: int, num_fewer: int) -> None:
        """Take back computed tokens, between two steps, and go on with other tokens."""
        if any(sequence.is_in_step for sequence in [*self.live.values(), *self.swapped.values()]):
            return
        sequence = self.live.get(seq_id) or self.swapped[seq_id]
        is_swapped = seq_id in self.swapped
        num_tokens = max(0, sequence.num_computed - num_fewer)
        if not is_swapped:
            num_tokens = min(num_tokens, self.cache.num_tokens(seq_id))
        elif num_tokens == sequence.num_computed:
            return
        held = [] if is_swapped else [block for block in self.cache.block_ids(seq_id) if block != NULL_BLOCK]
        is_shared = any(self.cache._pool.ref_count(block) > 1 for block in held)
        try:
            self.cache.truncate(seq_id, num_tokens)
        except ValueError:
            assert self.window is not None, "tokens that the sequence has"
            self.seen["left the window"] += 1
            return
        sequence.num_computed = num_tokens
        del sequence.tokens[num_tokens:]
        sequence.tokens.append(seq_id % 2)
        table = self.cache.swap_space.table(seq_id) if is_swapped else self.cache._tables[seq_id]
        del sequence.worker_table[len(table.columns) :]
        self.seen.update(truncated=True, truncated_shared=is_shared, cut=table.is_cut, truncated_swapped=is_swapped)

    def swap_out(self, seq_ids: list[int]) -> None:
        """Swap out those of some sequences that take no part in the step, and whose blocks it does not copy."""
        group = [seq_id for seq_id in seq_ids if not self.live[seq_id].is_in_step and not self._is_copied(seq_id)]
        num_blocks = self.cache.swap.footprint(group).num_blocks
        try:
            copies = self.cache.swap.swap_out(group)
        except OutOfBlocksError:
            assert self.cache.swap_space.num_free_blocks < num_blocks
            self.seen["swap space full"] += 1
            return
        assert len(copies) <= num_blocks, "a block moved twice"
        self.swap_outs += copies
        for seq_id in group:
            sequence = self.swapped[seq_id] = self.live.pop(seq_id)
            sequence.is_in_step = True
        self.seen.update(swapped_out=bool(group), shared_out=num_blocks < sum(map(self._num_held, group)))

    def _num_held(self, seq_id: int) -> int:
        return sum(block != NULL_BLOCK for block in self.swapped[seq_id].worker_table)

    def swap_in(self, seq_ids: list[int]) -> None:
        """Bring back those of some sequences that went out in an earlier step."""
        group = [seq_id for seq_id in seq_ids if not self.swapped[seq_id].is_in_step]
        need, num_free = self.cache.swap.num_blocks_to_swap_in(group), self.cache.num_free_blocks
        try:
            copies = self.cache.swap.swap_in(group)
        except OutOfBlocksError:
            assert need > num_free
            self.seen["no room to return"] += 1
            return
        assert len(copies) <= need == num_free - self.cache.num_free_blocks
        self.swap_ins += copies
        for seq_id in group:
            sequence = self.live[seq_id] = self.swapped.pop(seq_id)
            sequence.worker_table, sequence.is_in_step = self.cache.block_ids(seq_id), True
        num_returned = len({block for s in group for block in self.cache.block_ids(s) if block != NULL_BLOCK})
        self.seen.update(swapped_in=bool(copies), found_on_return=len(copies) < num_returned)

    def end_swapped(self, seq_id: int) -> None:
        """End a sequence that went out in an earlier step."""
        if not self.swapped[seq_id].is_in_step:
            self.free_swapped(seq_id)
            self.seen["swapped ended"] += 1

    def free_swapped(self, seq_id: int) -> None:
        """End a sequence that is swapped out."""
        del self.swapped[seq_id]
        self.cache.free(seq_id)

    def free(self, seq_id: int) -> None:
        """End a sequence; between two steps, all that it has computed must be found at once."""
        sequence = self.live.pop(seq_id)
        self._pass_on(sequence)
        self.cache.free(seq_id, sequence.num_computed)
        if not any(each.is_in_step for each in [sequence, *self.live.values()]):
            self._check_is_found(sequence, sequence.num_computed)

    def _pass_on(self, sequence: Live) -> None:
        """Let a fork do what the step was to do for the sequence as well: its blocks are still being computed."""
        heir, *others = [each for each in self.live.values() if each.writer is sequence] or [None]
        if heir is not None:
            heir.copies, heir.writes, heir.writer = sequence.copies, sequence.writes, None
        for other in others:
            other.writer = heir

    def end_step(self) -> None:
        """Do what the step was to do: swaps, copies, writes, reads."""
        self._swap()
        self._copy()
        for sequence in self.live.values():
            for position in sequence.writes:
                self._write(sequence, position, digest(sequence.tokens, sequence.scope, position))
        self.cache.end_step()
        for seq_id, sequence in self.live.items():
            table = self.cache.block_ids(seq_id)
            if sequence.is_in_step:
                sequence.num_computed, table = self.cache.num_tokens(seq_id), sequence.worker_table
            sequence.leave_step()
            self._check_readable(sequence, table)
        for sequence in self.swapped.values():
            sequence.leave_step()

    def fail_step(self) -> None:
        """Leave garbage behind; whoever took part is preempted."""
        for memory, copies in ((self.swap_memory, self.swap_outs), (self.memory, self.swap_ins)):
            memory.update({(copy.dst, offset): GARBAGE for copy in copies for offset in range(self.block_size)})
        self.swap_outs, self.swap_ins = [], []
        self._copy()
        for sequence in self.live.values():
            for position in sequence.writes:
                self._write(sequence, position, GARBAGE)
        for seq_id in [seq_id for seq_id, sequence in self.live.items() if sequence.is_in_step]:
            self.free(seq_id)
        for seq_id in [seq_id for seq_id, sequence in self.swapped.items() if sequence.is_in_step]:
            self.free_swapped(seq_id)
        self.cache.end_step()

    def end(self) -> None:
        """End everything: nothing is in use, and nothing is lost."""
        self.fail_step()
        for seq_id in list(self.live):
            self.free(seq_id)
        for seq_id in list(self.swapped):
            self.free_swapped(seq_id)
        self.check()
        for pin_id in list(self.pinned):
            self.unpin(pin_id)
        self.check()
        assert self.cache.num_free_blocks == self.num_blocks
        assert self.cache.swap_space.num_free_blocks == self.num_swap_blocks

    def _check_is_found(self, sequence: Live, num_tokens: int) -> None:
        """All full blocks can be found, but those behind one that was given up when it had left the window."""
        if self.window is None:
            num_full = num_tokens // self.block_size
            found = self.cache.match(sequence.tokens, num_full * self.block_size, sequence.scope)
            assert len(found.blocks) == num_full

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The cache's own invariants, and: no block in two scopes, none lost, every worker up to date."""
        self.cache.check()
        self._check_told()
        self._check_awaiting()
        scopes: dict[int, Scope | None] = {}
        for seq_id, sequence in self.live.items():
            blocks = self.cache.block_ids(seq_id)
            held = [pair for pair in zip(blocks, sequence.worker_table, strict=True) if pair[0] != NULL_BLOCK]
            for block, _ in held:
                assert scopes.setdefault(block, sequence.scope) == sequence.scope, "a block in two scopes"
            if any(block != seen_by_worker for block, seen_by_worker in held):
                self._check_is_told_later(seq_id)
        for pinned in self.pinned.values():
            self._check_pinned(pinned)
            for block in pinned.table:
                assert scopes.setdefault(block, pinned.scope) == pinned.scope, "a block in two scopes"
        in_use = scopes.keys() | set(self.cache._sources)
        assert self.cache.num_free_blocks == self.num_blocks - len(in_use)
        stats = self.cache.stats()
        assert stats.used_blocks == len(in_use)
        assert stats.pinned_blocks == len({block for pinned in self.pinned.values() for block in pinned.table})
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == self.num_blocks

    def _check_told(self) -> None:
        """A reader of all events knows the blocks that can be found now, and no other."""
        tree = self.cache.prefixes.events
        assert tree is not None
        self.seen["removed"] += any(event["type"] == "BlockRemoved" for event in self.reader.apply(tree.take_events()))
        assert self.reader.blocks == findable(tree)

    def _check_awaiting(self) -> None:
        """A wait that goes on is what a new match would say; one that is over is forgotten."""
        goes_on = []
        for tokens, scope, awaited in self.awaiting:
            if (now := self.cache.prefixes.still_awaits(awaited, tokens)) is not None:
                assert self.cache.match(tokens, len(tokens), scope).awaited == now
                goes_on.append((tokens, scope, now))
            elif any(each.is_in_step for each in self.live.values()):
                continue
            else:
                goes_on.append((tokens, scope, awaited))    # between two steps nothing is computed
        self.awaiting = goes_on[-MAX_SEQUENCES:]

    def _check_is_told_later(self, seq_id: int) -> None:
        """An adoption: the worker hears of it with the next append, before it computes anything on the table."""
        assert self.cache._tables[seq_id]._first_replaced is not None
        assert not self.live[seq_id].has_appended

    def _check_match(self, match: PrefixMatch, tokens: list[int], scope: Scope | None) -> None:
        assert match.num_tokens < len(tokens)
        held = [(block, self.block_size) for block in match.blocks]
        if match.num_inside:
            held.append((match.source, match.num_inside))
        for column, (block, num_tokens) in enumerate(held):
            for offset in range(num_tokens):
                expected = digest(tokens, scope, column * self.block_size + offset)
                assert self.memory.get((block, offset)) == expected, f"block {block} is not what was looked for"

    def _check_pinned(self, pinned: Pinned) -> None:
        """A pin is found whole, to the last token, and holds what it held."""
        tokens = [*pinned.tokens, 2]  # owned by no sequence
        found = self.cache.match(tokens, len(tokens), pinned.scope)
        assert (found.num_tokens, found.is_pending) == (len(pinned.tokens), False)
        self._check_match(found, tokens, pinned.scope)
        for position in range(len(pinned.tokens)):
            column, offset = divmod(position, self.block_size)
            kept = self.memory.get((pinned.table[column], offset))
            assert kept == digest(tokens, pinned.scope, position), f"a pin has lost position {position}"

    def _check_readable(self, sequence: Live, table: list[int]) -> None:
        first = 0 if self.window is None else max(0, sequence.num_computed - self.window + 1)
        for position in range(first, sequence.num_computed):
            column, offset = divmod(position, self.block_size)
            read = self.memory.get((table[column], offset))
            assert read == digest(sequence.tokens, sequence.scope, position), f"wrong keys at {position}"

    # --- the worker -----------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        for copies, source, target in (
            (self.swap_outs, self.memory, self.swap_memory),
            (self.swap_ins, self.swap_memory, self.memory),
        ):
            assert len({copy.dst for copy in copies}) == len(copies), "two blocks into one"
            for src, dst in copies:
                for offset in range(self.block_size):
                    target[dst, offset] = source.get((src, offset), GARBAGE)
        self.swap_outs, self.swap_ins = [], []

    def _copy(self) -> None:
        copies = [copy for sequence in self.live.values() for copy in sequence.copies]
        assert not {copy.dst for copy in copies} & {copy.src for copy in copies}, "a copy of a copy"
        for src, dst in copies:
            for offset in range(self.block_size):
                self.memory[dst, offset] = self.memory.get((src, offset), GARBAGE)

    def _write(self, sequence: Live, position: int, content: int) -> None:
        column, offset = divmod(position, self.block_size)
        self.memory[sequence.worker_table[column], offset] = content


def digest(tokens: list[int], scope: Scope | None, position: int) -> int:
    """What keys and values at a position depend on, as a number that is never GARBAGE."""
    return hash((SCOPES.index(scope), *tokens[: position + 1])) & (2**62 - 1)


class PrefixMachine(RuleBasedStateMachine):
    """The verbs as rules; numbers say which sequence is meant, however many there are."""

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        window=st.none() | st.integers(1, 9),
        num_swap_blocks=st.integers(1, 24),
    )
    def begin_world(self, num_blocks: int, block_size: int, window: int | None, num_swap_blocks: int) -> None:
        self.world = World(num_blocks, block_size, window, num_swap_blocks)

    def pick(self, index: int) -> int:
        return sorted(self.world.live)[index % len(self.world.live)]

    def pick_swapped(self, index: int) -> int:
        return sorted(self.world.swapped)[index % len(self.world.swapped)]

    def has_swapped(self) -> bool:
        return len(self.world.swapped) > 0

    def has_sequences(self) -> bool:
        return len(self.world.live) > 0

    def has_room(self) -> bool:
        return len(self.world.live) + len(self.world.swapped) < MAX_SEQUENCES

    @precondition(has_room)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world.begin(lambda end: data.draw(st.integers(0, end - 1)))

    @precondition(has_room)
    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def begin_and_append(self, data: st.DataObject, num_tokens: int) -> None:
        before = set(self.world.live)
        self.begin(data)
        for seq_id in self.world.live.keys() - before:
            self.world.append(seq_id, num_tokens)

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1), num_tokens=st.integers(0, 12))
    def append(self, index: int, num_tokens: int) -> None:
        self.world.append(self.pick(index), num_tokens)

    @precondition(has_sequences)
    @rule(num_steps=st.integers(1, 4), token=st.integers(0, 1))
    def decode(self, num_steps: int, token: int) -> None:
        for _ in range(num_steps):
            for seq_id in sorted(self.world.live):
                self.world.append(seq_id, token)
            self.world.end_step()

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(lambda self: self.has_sequences() and self.has_room())
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def fork(self, index: int) -> None:
        self.world.fork(self.pick(index))

    @precondition(has_sequences)
    @rule(parent=st.integers(0, MAX_SEQUENCES - 1), child=st.integers(0, MAX_SEQUENCES - 1))
    def refork(self, parent: int, child: int) -> None:
        self.world.refork(self.pick(parent), self.pick(child))

    @precondition(lambda self: self.has_sequences() and len(self.world.pinned) < MAX_PINS)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def pin(self, index: int) -> None:
        self.world.pin(self.pick(index))

    @precondition(lambda self: len(self.world.pinned) > 0)
    @rule(index=st.integers(0, MAX_PINS - 1))
    def unpin(self, index: int) -> None:
        self.world.unpin_one(list(self.world.pinned)[index % len(self.world.pinned)])

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def free(self, index: int) -> None:
        self.world.end_one(self.pick(index))

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1), num_fewer=st.integers(0, 12))
    def truncate(self, index: int, num_fewer: int) -> None:
        self.world.truncate(self.pick(index), num_fewer)

    @precondition(has_swapped)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1), num_fewer=st.integers(0, 12))
    def truncate_swapped(self, index: int, num_fewer: int) -> None:
        self.world.truncate(self.pick_swapped(index), num_fewer)

    @precondition(has_sequences)
    @rule(indices=st.sets(st.integers(0, MAX_SEQUENCES - 1), min_size=1), retracts=st.booleans())
    def swap_out(self, indices: set[int], retracts: bool) -> None:
        if retracts:
            self.world.retract()
        self.world.swap_out(sorted({self.pick(index) for index in indices}))

    @precondition(has_swapped)
    @rule(indices=st.sets(st.integers(0, MAX_SEQUENCES - 1), min_size=1))
    def swap_in(self, indices: set[int]) -> None:
        self.world.swap_in(sorted({self.pick_swapped(index) for index in indices}))

    @precondition(has_swapped)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def end_swapped(self, index: int) -> None:
        self.world.end_swapped(self.pick_swapped(index))

    @rule()
    def end_step(self) -> None:
        self.world.end_step()

    @rule()
    def fail_step(self) -> None:
        self.world.fail_step()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


PrefixMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, print_blob=True
)
TestPrefixMachine = PrefixMachine.TestCase


def random_life(rng: random.Random, num_steps: int) -> Counter[str]:
    """One cache from start to end: `num_steps` operations, a check after each. Returns what it has seen."""
    window = rng.choice((None, rng.randint(1, 4), rng.randint(1, 16)))
    world = World(rng.randint(1, 40), rng.choice((1, 2, 3, 4, 8)), window, rng.randint(1, 40))
    for _ in range(num_steps):
        random_step(world, rng)
        world.check()
    world.end()
    world.seen["evicted"] += world.cache.stats().evicted_blocks
    return world.seen


def random_step(world: World, rng: random.Random) -> None:
    """One operation; the weights keep pools nearly full."""
    has_room = len(world.live) + len(world.swapped) < MAX_SEQUENCES
    if world.swapped and rng.random() < 0.15:
        returning = rng.sample(sorted(world.swapped), rng.randint(1, len(world.swapped)))
        world.swap_in(returning) if rng.random() < 0.9 else world.end_swapped(returning[0])
        return
    if not world.live and not has_room:
        world.end_step()
        return
    if not world.live or (has_room and rng.random() < 0.15):
        for _ in range(rng.choice((1, 2))):  # the second may find that the first is at work on what it needs
            before = set(world.live)
            world.begin(rng.randrange)
            for begun in world.live.keys() - before:
                world.append(begun, rng.randint(0, 20))
        return
    random_verb(world, rng, rng.choice(list(world.live)), has_room)


def random_verb(world: World, rng: random.Random, seq_id: int, has_room: bool) -> None:
    """Something happens to a sequence, or to all of them."""
    verbs = {
        "one": 50, "chunk": 15, "fork": 8, "free": 8, "end": 30, "fail": 1, "publish": 20, "retract": 6, "swap": 8,
        "pin": 6, "unpin": 4, "refork": 8, "truncate": 20,
    }  # fmt: skip
    verb = rng.choices(list(verbs), list(verbs.values()))[0]
    if verb == "one":
        world.append(seq_id, 0)
    elif verb == "chunk":
        world.append(seq_id, rng.randint(0, 20))
    elif verb == "fork" and has_room:
        world.fork(seq_id)
    elif verb == "refork":
        world.refork(seq_id, rng.choice(list(world.live)))
    elif verb == "pin" and len(world.pinned) < MAX_PINS:
        world.pin(seq_id)
    elif verb == "unpin" and world.pinned:
        world.unpin_one(rng.choice(list(world.pinned)))
    elif verb == "truncate":
        world.truncate(rng.choice([*world.live, *world.swapped]), rng.randint(0, 12))
    elif verb == "free":
        world.end_one(seq_id)
    elif verb == "publish":
        world.publish()
    elif verb in ("retract", "swap"):
        if verb == "retract":
            for each in list(world.live):
                world.append(each, 0)
            world.retract()
        world.swap_out(rng.sample(sorted(world.live), rng.randint(1, len(world.live))))
    elif verb == "fail":
        world.fail_step()
    else:
        world.end_step()


def test_random_lives_see_everything_that_can_happen() -> None:
    seen = Counter[str]()
    for seed in range(20):
        seen += random_life(random.Random(seed), 200)
    assert set(seen) == {
        *("reforked", "found", "inside", "pending", "full", "adopted", "stored", "evicted", "pinned", "tail"),
        *("removed", "swapped_out", "shared_out", "swap space full", "retracted", "copy_retracted"),
        *("swapped_in", "found_on_return", "no room to return", "swapped ended"),
        *("truncated", "truncated_shared", "truncated_swapped", "cut", "left the window"),
    }


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_million_random_steps_keep_every_promise() -> None:
    """`World.check` asserts every promise after each operation."""
    fuzz(lambda seed: random_life(random.Random(seed), STEPS_PER_RUN), 10**6)
