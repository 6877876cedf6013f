"""States of sequences: what recurrent layers keep of each, in slots of a pool of their own, and snapshots of them.

A slot holds the layers' states after `committed` tokens of a sequence, and the inputs of its tokens since then. The
tokens that a step may take back are never committed, so that nothing has to be restored. A running sequence has one
slot, which it shares with its forks until each of them has been computed: a step reads the shared one, and writes to
another.
A snapshot is the state at the end of a full block. In the prefix tree it belongs to the block's node, and it goes with
it; a match ends at the deepest node with one. Snapshots are what is left of the slots: new ones take the place of those
that were used the longest ago, and all of them make room for running sequences (docs/decisions/0041).

Slots are given out when all entries of a step are known, so a plan that is changed before that changes nothing here. A
step that is planned runs after those that were planned before it. So a slot may be given to another sequence as soon as
the plan is complete that reads it last.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import BlockTable
from quire.cache.prefix_tree import NONE, Path, PrefixMatch, PrefixTree, Scope
from quire.core.config import CacheConfig
from quire.core.plan import MAX_SNAPSHOTS, BlockCopy, EntryState
from quire.core.token_ids import num_equal_tokens


def most_slots(num_seqs: int) -> int:
    """Return the most slots that so many running sequences have at once.

    In a step, those that share a slot read that and write to one each: half as many again, if all share in pairs.
    """
    return num_seqs + num_seqs // 2


def most_sequences(num_slots: int) -> int:
    """Return how many sequences can run at once in so many slots."""
    return (2 * num_slots + 1) // 3


class PlannedEntry(NamedTuple):
    """An entry of a plan: its first token's position, and one past its last that is known, drafts excepted."""

    seq_id: int
    start: int
    stop: int
    num_prompt_tokens: int
    may_be_late: bool = False  # its last known token may have to be computed again: the state stays before that


class HeldSnapshot(NamedTuple):
    """The state after `position` tokens of a sequence, which holds it. `step`: the number of the one that takes it."""

    position: int
    slot: int
    step: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """The state of a sequence: `slot` holds it after `committed` tokens. NONE: it has computed nothing."""

    path: Path | None                   # its way through the prefix tree; None: others cannot find it
    slot: int = NONE
    committed: int = 0
    wanted: set[int] = field(default_factory=set)  # positions of snapshots that others are likely to need
    snapshots: list[HeldSnapshot] = field(default_factory=list)  # not in the tree yet; ascending
    holds_wanted: bool = False          # whether one of them is for others


class SnapshotTree(PrefixTree):
    """A prefix tree in which nodes may have a snapshot: the slot of the state at the end of their block."""

    __slots__ = ("num_evicted", "slots", "snapshots")

    def __init__(self, config: CacheConfig, slots: BlockPool) -> None:
        super().__init__(config.num_blocks, config.block_size)
        self.slots = slots
        self.snapshots = OrderedDict[int, int]()    # slot of each node that has one; used the longest ago first
        self.num_evicted = 0

    def remove(self, block: int) -> None:
        """Take a leaf out of the tree, and its snapshot with it."""
        super().remove(block)
        if (slot := self.snapshots.pop(block, None)) is not None:
            self.slots.release(slot)

    def attach(self, block: int, slot: int) -> None:
        """Give a node a snapshot, the last to be evicted. The caller's share of the slot is the tree's from now on."""
        assert block in self, f"a snapshot for block {block}, which is not in the tree"
        if block in self.snapshots:                 # the same tokens: equal bits
            self.slots.release(slot)
        else:
            self.snapshots[block] = slot
        self.snapshots.move_to_end(block)

    def evict(self, kept: Collection[int] = (), *, frees: bool = False) -> bool:
        """Give up the snapshot that was used the longest ago, none in the slots `kept`; False if there is none.

        `frees`: nor one in a slot with other owners, which would not become free.
        """
        for _ in range(len(self.snapshots)):
            block, slot = next(iter(self.snapshots.items()))
            if slot not in kept and not (frees and self.slots.ref_count(slot) > 1):
                self.slots.release(self.snapshots.pop(block))
                self.num_evicted += 1
                return True
            self.snapshots.move_to_end(block)       # to be kept is a use; and the next call does not pass it again
        return False

    def last_column(self, blocks: Sequence[int]) -> int | None:
        """Return the place of the last of some blocks that has a snapshot; None: none has."""
        return next((column for column in reversed(range(len(blocks))) if blocks[column] in self.snapshots), None)

    def with_state(self, match: PrefixMatch, stop: int, pool: BlockPool) -> PrefixMatch:
        """Return a match of whole blocks of a pool as far as there is a state that leaves one of `stop` tokens."""
        num_usable = min(len(match.blocks), (stop - 1) // self.block_size)
        num_found = num_usable
        while num_found and match.blocks[num_found - 1] not in self.snapshots:
            num_found -= 1
        blocks = match.blocks[:num_found]
        return match._replace(
            blocks=blocks, num_tokens=num_found * self.block_size, num_known=min(match.num_known, num_usable),
            num_in_use=sum(pool.ref_count(block) > 0 for block in blocks), num_stateless=num_usable - num_found,
        )  # fmt: skip


class KeptSlots:
    """Slots of the snapshots that are kept, in the order in which their keepers came; a slot may have several."""

    def __init__(self) -> None:
        self.by_keeper: dict[int, int] = {}
        self.num_keepers = Counter[int]()               # by slot

    def add(self, keeper: int, slot: int) -> None:
        self.by_keeper[keeper] = slot
        self.num_keepers[slot] += 1

    def pop(self, keeper: int) -> int | None:
        """Return the slot of a keeper, which keeps it no more; None if it keeps none."""
        if (slot := self.by_keeper.pop(keeper, None)) is not None:
            self.num_keepers[slot] -= 1
            if not self.num_keepers[slot]:
                del self.num_keepers[slot]
        return slot


class States:
    """The states of a cache's sequences. `tables`: their block tables by id; `tree`: None, nothing can be found."""

    def __init__(self, config: CacheConfig, tables: Mapping[int, BlockTable], tree: SnapshotTree | None) -> None:
        self._tables, self._tree, self._size = tables, tree, config.block_size
        self.slots = BlockPool(config.num_state_slots) if tree is None else tree.slots
        self._swap_slots = BlockPool(config.num_swap_slots, may_be_empty=True)
        self._states: dict[int, SequenceState] = {}
        self._swapped: dict[int, SequenceState] = {}    # slots of the swap space
        self._forks: list[tuple[SequenceState, SequenceState]] = []  # parents and children of the step being planned
        self._sources: list[int] = []                   # swap slots that the step under way reads
        self._num_planned = self._num_ended = 0         # steps
        self._num_taken = 0                             # snapshots planned since start
        self._leased: dict[int, int] = {}               # slot of each lease, to be filled with a snapshot
        self._kept = KeptSlots()
        self.on_give_up: Callable[[int], None] | None = None    # called before a keeper's slot is given up

    @property
    def num_slots(self) -> int:
        """Slots of the pool, free and in use."""
        return self.slots.num_blocks

    # --- sequences ------------------------------------------------------------------------------------------------

    def begin(self, seq_id: int, match: PrefixMatch) -> None:
        """Begin a sequence that has a table, with the state at the end of a match."""
        state = self._states[seq_id] = SequenceState(self._tables[seq_id].path)
        if match.num_stateless:
            state.wanted.add(match.num_tokens + match.num_stateless * self._size)
        if match.blocks:
            assert self._tree is not None, "a match without a prefix tree"
            block = match.blocks[-1]
            state.slot, state.committed = self._tree.snapshots[block], match.num_tokens
            self.slots.share(state.slot)
            self._tree.snapshots.move_to_end(block)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begin a sequence that has a table, with the state that another has when the step being planned is over."""
        state = self._states[child_id] = SequenceState(self._tables[child_id].path)
        self._forks.append((self._states[parent_id], state))

    def refork(self, parent_id: int, child_id: int) -> None:
        """End a sequence, and begin it again with the state of another. Between two steps."""
        self._release(self._states[child_id], self.slots)
        state = self._states[child_id] = SequenceState(self._tables[child_id].path)
        self._share(self._states[parent_id], state)

    def settle(self, seq_id: int) -> None:
        """Let the snapshots of a sequence be found that ends, as far as its blocks are; the others are given up."""
        state = self._states.get(seq_id)
        if state is not None and state.snapshots:
            state.snapshots = self._attach(state, self._tables[seq_id], self._written(state))
            self._forget(state)

    def free(self, seq_id: int) -> None:
        """End a sequence, swapped out or not; without `settle`, its snapshots are lost."""
        if seq_id in self._swapped:
            self._release(self._swapped.pop(seq_id), self._swap_slots)
            return
        state = self._states.pop(seq_id)
        self._release(state, self.slots)
        if self._forks:
            self._forks = [each for each in self._forks if state not in each]

    def invalidate(self, seq_id: int) -> None:
        """Give up the snapshots that a sequence holds: they may be NaN."""
        if (state := self._states.get(seq_id)) is not None:
            self._forget(state)

    def want(self, path: Path, token_ids: Sequence[int], stop: int) -> None:
        """Let the sequence of a path leave a snapshot where another, of `stop` tokens, no longer equals it.

        That one waits for blocks that the sequence of the path computes in this step.
        """
        state = next((each for each in self._states.values() if each.path is path), None)
        if state is not None:
            num_common = min(stop, len(path.token_ids), len(token_ids))
            num_equal = min(num_equal_tokens(path.token_ids, token_ids, num_common), stop - 1)
            if (position := num_equal // self._size * self._size) > state.committed:
                state.wanted.add(position)

    def is_expected(self, match: PrefixMatch, scope: Scope, token_ids: Sequence[int]) -> bool:
        """Return whether a running sequence is to leave a snapshot behind a match, as far as there are blocks."""
        if not match.num_stateless:
            return False
        stop = match.num_tokens + match.num_stateless * self._size
        for state in self._states.values():
            if state.path is None or state.path.scope != scope:
                continue
            positions = [each for each in state.wanted if max(match.num_tokens, state.committed) < each <= stop]
            if positions:                               # one that equals it to any of them does so to the first
                first = min(positions)
                if num_equal_tokens(state.path.token_ids, token_ids, first) == first:
                    return True
        return False

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan(self, entries: Iterable[PlannedEntry]) -> list[EntryState]:
        """Return what a step does with the state of each entry. All that it allocates and releases is done by now."""
        left, planned, positions = list[int](), list[EntryState](), list[tuple[SequenceState, list[int]]]()
        for entry in entries:
            state = self._states[entry.seq_id]
            if len(state.snapshots) > 1:
                self._give_up_output(state, 1)
            read, committed = state.slot, state.committed
            assert committed <= entry.start, f"sequence {entry.seq_id} at {entry.start} has committed {committed}"
            commit_to = max(committed, entry.stop - entry.may_be_late)
            write = self._slot_to_write(state)
            if read not in {write, NONE}:
                left.append(read)
            state.slot, state.committed = write, commit_to
            planned.append(EntryState(read, committed, write, commit_to))
            positions.append((state, self._positions(state, committed, entry.num_prompt_tokens)))
        if self._tree is not None:
            for index, (state, own) in enumerate(positions):
                if own and (snapshots := self._take(state, own)):
                    planned[index] = planned[index]._replace(snapshots=snapshots)
        for slot in left:
            self.slots.release(slot)
        for parent, child in self._forks:
            self._share(parent, child)
        self._forks.clear()
        self._num_planned += 1
        return planned

    def end_step(self) -> None:
        """End the first planned step that has not ended: what it has computed can be found from now on."""
        self._num_ended += 1
        self._release_sources()
        self.publish()

    def end_failed(self) -> None:
        """End all planned steps. Those that had a part in them have been freed."""
        self._num_ended = self._num_planned
        self._release_sources()

    def publish(self) -> None:
        """Let snapshots of running sequences be found that others want; those of its output move on with it."""
        for seq_id, state in self._states.items():
            if state.holds_wanted:
                wanted = [each for each in self._written(state) if each.position in state.wanted]
                state.snapshots = self._attach(state, self._tables[seq_id], wanted)
                state.holds_wanted = any(each.position in state.wanted for each in state.snapshots)

    def _slot_to_write(self, state: SequenceState) -> int:
        """Return the slot that a state is written to: its own, if it has no other holder, or another."""
        while state.slot == NONE or self.slots.ref_count(state.slot) > 1:
            if self.slots.num_free_blocks:
                return self.slots.allocate(1)[0]
            self._make_room()
        return state.slot

    def _make_room(self) -> None:
        """Give up a snapshot: of the tree, or else one that is being loaded, is kept, or a running sequence holds."""
        if self._tree_evicts():
            return
        if self._leased:
            self.slots.release(self._leased.pop(next(iter(self._leased))))
            return
        if self._kept.by_keeper:
            self._give_up()
            return
        holder = next((each for each in self._states.values() if each.snapshots), None)
        assert holder is not None, "more sequences run than there are slots for"
        self.slots.release(holder.snapshots.pop(0).slot)

    def _tree_evicts(self, *, frees: bool = False) -> bool:
        return self._tree is not None and self._tree.evict(self._kept.num_keepers, frees=frees)

    def _positions(self, state: SequenceState, committed: int, num_prompt_tokens: int) -> list[int]:
        """Return where a sequence leaves snapshots in a step, ascending, at most MAX_SNAPSHOTS.

        At the last full block of its prompt, where others need one, and at the last full block of its output.
        """
        if state.path is None or self._tree is None or committed // self._size == state.committed // self._size:
            return []                                   # most steps of decoding pass no end of a block
        state.wanted.add((num_prompt_tokens - 1) // self._size * self._size)
        found = {each for each in state.wanted if committed < each <= state.committed}
        border = state.committed // self._size * self._size
        if border > committed and border >= num_prompt_tokens:
            found.add(border)
        return sorted(found)[-MAX_SNAPSHOTS:]

    def _take(self, state: SequenceState, positions: list[int]) -> tuple[tuple[int, int], ...]:
        """Give slots to snapshots of a sequence, as far as there are any; return positions and slots."""
        taken = []
        for position in positions:
            if not self.slots.num_free_blocks and not self._give_up_output(state, 0):
                self._tree_evicts(frees=True)
            if not self.slots.num_free_blocks:
                break
            slot = self.slots.allocate(1)[0]
            state.snapshots.append(HeldSnapshot(position, slot, self._num_planned))
            taken.append((position, slot))
            state.holds_wanted |= position in state.wanted
        self._num_taken += len(taken)
        return tuple(taken)

    def _give_up_output(self, state: SequenceState, num_left: int) -> bool:
        """Give up the written snapshots of an output but the last `num_left`; return whether there were any."""
        written = [each for each in self._written(state) if each.position not in state.wanted]
        given_up = written[: max(0, len(written) - num_left)]
        for each in given_up:
            state.snapshots.remove(each)
            self.slots.release(each.slot)
        return bool(given_up)

    def _written(self, state: SequenceState) -> list[HeldSnapshot]:
        return [each for each in state.snapshots if each.step < self._num_ended]

    def _attach(self, state: SequenceState, table: BlockTable, snapshots: list[HeldSnapshot]) -> list[HeldSnapshot]:
        """Give some of a sequence's snapshots to the nodes of its blocks that are in the tree; return the others."""
        path, tree, left = table.path, self._tree, list(state.snapshots)
        if path is None or tree is None or path.swap_in_pending:
            return left
        for each in snapshots:
            column = each.position // self._size - 1
            if column < path.num_blocks and (block := table.columns[column]) in tree and block not in tree.pending:
                tree.attach(block, each.slot)
                left.remove(each)
        return left

    def _share(self, parent: SequenceState, child: SequenceState) -> None:
        child.slot, child.committed = parent.slot, parent.committed
        if child.slot != NONE:
            self.slots.share(child.slot)

    def _release(self, state: SequenceState, slots: BlockPool) -> None:
        self._forget(state)
        if state.slot != NONE:
            slots.release(state.slot)
            state.slot = NONE

    def _forget(self, state: SequenceState) -> None:
        while state.snapshots:
            self.slots.release(state.snapshots.pop().slot)

    def _release_sources(self) -> None:
        while self._sources:
            self._swap_slots.release(self._sources.pop())

    # --- snapshots that are kept ------------------------------------------------------------------------------------

    def keep(self, keeper: int, blocks: Sequence[int]) -> int | None:
        """Keep the snapshot of the last of some blocks that has one; return its slot, None if none has.

        At most half of the slots are kept. For one more the oldest is given up, and so are all, where running sequences
        need their slots: what is given up is in the tree like any other. keeper: id of a pin or of a ticket's lease.
        """
        column = None if self._tree is None else self._tree.last_column(blocks)
        if self._tree is None or column is None or keeper in self._kept.by_keeper:
            return None
        slot = self._tree.snapshots[blocks[column]]
        others = self._kept.num_keepers
        while slot not in others and len(others) >= max(1, self.num_slots // 2):
            self._give_up()
        self.slots.share(slot)
        self._kept.add(keeper, slot)
        return slot

    def kept(self, keeper: int) -> int | None:
        """Return the slot of a keeper; None if it keeps none, or it has been given up."""
        return self._kept.by_keeper.get(keeper)

    def end_keep(self, keeper: int) -> None:
        """Keep a snapshot no more, if it is kept still."""
        if (slot := self._kept.pop(keeper)) is not None:
            self.slots.release(slot)

    def _give_up(self) -> None:
        """Keep one snapshot less, the one that has been kept the longest."""
        keeper = next(iter(self._kept.by_keeper))
        if self.on_give_up is not None:
            self.on_give_up(keeper)
        self.end_keep(keeper)

    # --- snapshots from elsewhere: see quire.cache.loads -------------------------------------------------------------

    def lease(self, lease_id: int) -> bool:
        """Hold a slot that is to be filled with a snapshot, until running sequences need it; False if there is none."""
        if not self.slots.num_free_blocks and not self._tree_evicts(frees=True):
            return False
        (self._leased[lease_id],) = self.slots.allocate(1)
        return True

    def leased(self, lease_id: int) -> int | None:
        """Return the slot of a lease; None if it has been given up."""
        return self._leased.get(lease_id)

    def publish_lease(self, lease_id: int, block: int) -> None:
        """Let the snapshot in the slot of a lease, which is filled, be found at a node, and end the lease."""
        if (slot := self._leased.pop(lease_id, None)) is not None:
            assert self._tree is not None, "a lease without a prefix tree"
            self._tree.attach(block, slot)

    def end_lease(self, lease_id: int) -> None:
        """Give up the slot of a lease, if it has one."""
        if (slot := self._leased.pop(lease_id, None)) is not None:
            self.slots.release(slot)

    # --- swapping -------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Iterable[int]) -> bool:
        """Return whether the swap space has slots for some sequences."""
        return len({self._states[each].slot for each in seq_ids} - {NONE}) <= self._swap_slots.num_free_blocks

    def swap_out(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Move a group's states to the swap space, before its blocks; return the slots to copy.

        Its snapshots are found in the tree, or lost: `settle` them before.
        """
        states = {seq_id: self._states[seq_id] for seq_id in seq_ids}
        copies = self._relocated(states.values(), self.slots, self._swap_slots)
        for seq_id, state in states.items():
            self._forget(state)
            self._swapped[seq_id] = state
            del self._states[seq_id]
        self._forks = [each for each in self._forks if each[1] not in states.values()]  # they begin anew
        return copies

    def swap_in(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Move a group's states back, behind its blocks; return the slots to copy."""
        states = {seq_id: self._swapped.pop(seq_id) for seq_id in seq_ids}
        held = [state.slot for state in states.values() if state.slot != NONE]
        for slot in set(held):
            self._swap_slots.share(slot)
            self._sources.append(slot)                  # another may not be written there before it has been read
        copies = self._relocated(states.values(), self._swap_slots, self.slots)
        for seq_id, state in states.items():
            state.path = self._tables[seq_id].path
            self._states[seq_id] = state
        return copies

    def _relocated(self, states: Iterable[SequenceState], old: BlockPool, new: BlockPool) -> list[BlockCopy]:
        """Move states to another pool, in which they share what they share; return the slots to copy."""
        places = dict[int, int]()
        for state in states:
            if state.slot == NONE:
                continue
            if state.slot in places:
                new.share(places[state.slot])
            else:
                while new is self.slots and not new.num_free_blocks:
                    self._make_room()
                places[state.slot] = new.allocate(1)[0]
            old.release(state.slot)
            state.slot = places[state.slot]
        return [BlockCopy(src, dst) for src, dst in places.items()]

    # --- seen -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return how many slots there are, have states of running sequences, have snapshots alone, and kept ones."""
        used = {state.slot for state in self._states.values()} - {NONE}
        held = {each.slot for state in self._states.values() for each in state.snapshots}
        kept = self._kept.num_keepers.keys()
        held |= kept
        if self._tree is not None:
            held.update(self._tree.snapshots.values())
        return {
            "total_slots": self.num_slots,
            "used_slots": len(used),
            "snapshot_slots": len(held - used),
            "kept_slots": len(kept - used),
            "snapshots": self._num_taken,
            "evicted_snapshots": 0 if self._tree is None else self._tree.num_evicted,
            "swap_total_slots": self._swap_slots.num_blocks,
            "swap_used_slots": self._swap_slots.num_blocks - self._swap_slots.num_free_blocks,
        }

    def check(self) -> None:
        """Assert that slots have as many owners as holders, and that states are not ahead of their sequences."""
        assert not self._forks, "forks of a plan that is not complete"
        holders = Counter(state.slot for state in self._states.values())
        holders.update(each.slot for state in self._states.values() for each in state.snapshots)
        kept, num_keepers = self._kept.by_keeper, self._kept.num_keepers
        holders.update((*self._leased.values(), *kept.values()))
        assert num_keepers == Counter(kept.values()), f"{num_keepers} keepers of slots, not {kept}"
        assert len(num_keepers) <= max(1, self.num_slots // 2), f"{kept} are kept of {self.num_slots} slots"
        if self._tree is not None:
            holders.update(self._tree.snapshots.values())
            gone = [block for block in self._tree.snapshots if block not in self._tree]
            assert not gone, f"snapshots of blocks {gone}, which are not in the tree"
        _check_owners(self.slots, holders)
        _check_owners(self._swap_slots, Counter([*(each.slot for each in self._swapped.values()), *self._sources]))
        for seq_id, state in self._states.items():
            assert state.committed <= self._tables[seq_id].num_filled, f"sequence {seq_id}: {state}"
            positions = [each.position for each in state.snapshots]
            assert positions == sorted(positions), f"sequence {seq_id}: snapshots at {positions}"


def _check_owners(slots: BlockPool, holders: Counter[int]) -> None:
    slots.check()
    del holders[NONE]
    counted = np.zeros(slots.num_blocks, dtype=np.int32)
    for slot, num_holders in holders.items():
        counted[slot] = num_holders
    wrong = np.flatnonzero(counted != slots.ref_counts())
    assert not len(wrong), f"slots {wrong} have {slots.ref_counts()[wrong]} owners, but held {counted[wrong]} times"
