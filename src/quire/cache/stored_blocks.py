"""Exact tree of the full blocks in a disk tier: their slots, matches, and the order of eviction. No clock, no I/O.

A node is named by its slot in the store and found by its parent's slot and its tokens, below the root of its scope: a
`PrefixTree` over slots instead of blocks. Ancestors of a stored block are stored: the least recently used leaf is
evicted first, and a block that cannot be read is removed with all that is below it. Each use of a path moves its
slots to the end of the order, the deepest first, so in that order every child comes before its parent.

A slot is held while its bytes are being written or read: it is not evicted, and not given out again if its record is
removed meanwhile.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

from quire.cache.prefix_tree import NONE, PrefixTree
from quire.core.kv_identity import NO_PARENT, StoredBlock
from quire.core.token_ids import TOKEN_BYTES

SCOPE_BYTES = 32


class StoredBlocks:
    """The tree over `num_slots` slots. Runs of tokens are given packed: `prefix_tree.as_bytes`."""

    __slots__ = ("_dead", "_free", "_held", "_num_bytes", "_order", "_tree", "forgotten", "num_evicted", "num_slots")

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self._tree = PrefixTree(num_slots, block_size)     # pending: nodes with bytes that are being written
        self._num_bytes = block_size * TOKEN_BYTES        # one node's tokens
        self._order = OrderedDict[int, None]()             # the least recently used slot first
        self._free = list(range(num_slots))                # a heap: the file of a store ends with its highest slot
        self._held = Counter[int]()                        # reads and writes of each slot
        self._dead = set[int]()                            # removed while held: free when they are released
        self.forgotten: list[int] = []                     # slots with records on disk that count no more
        self.num_evicted = 0                               # since start

    def __len__(self) -> int:
        """Count the stored blocks, those being written included."""
        return len(self._order)

    def __contains__(self, slot: int) -> bool:
        """Return whether a slot has a block, written or being written."""
        return slot in self._order

    def recover(self, records: Iterable[StoredBlock]) -> None:
        """Take the records of a store that has just been opened into the empty tree, parents first, oldest first.

        Records that do not fit (no such slot or parent, a slot or a place in the tree that is taken) are forgotten.
        """
        tree, scopes, taken = self._tree, dict[int, bytes](), list[StoredBlock]()
        for record in records:
            slot, parent, tokens, scope = record
            if not 0 <= slot < self.num_slots or slot in scopes:
                continue
            is_sound = len(tokens) == self._num_bytes and len(scope) == SCOPE_BYTES
            if not is_sound or (parent != NO_PARENT and scopes.get(parent) != scope):
                self.forgotten.append(slot)
                continue
            node = parent if parent != NO_PARENT else tree.open_root(scope)
            if tree.find(key := tree.key_at(node, tokens, 0)) is not None:
                self.forgotten.append(slot)
                continue
            tree.insert(node, key, slot)
            scopes[slot] = scope
            taken.append(record)
        last_use = {record.slot: index for index, record in enumerate(taken)}
        depth = dict[int, int]()
        for slot, parent, _, _ in taken:
            depth[slot] = depth[parent] + 1 if parent != NO_PARENT else 0
        for slot, parent, _, _ in reversed(taken):
            if parent != NO_PARENT:
                last_use[parent] = max(last_use[parent], last_use[slot])
        self._order.update(dict.fromkeys(sorted(last_use, key=lambda slot: (last_use[slot], -depth[slot]))))
        self._free = [slot for slot in self._free if slot not in last_use]

    # --- looking up -----------------------------------------------------------------------------------------------

    def path(self, scope: bytes, packed: bytes) -> list[int]:
        """Return the slots of the longest stored run of these tokens, those being written included."""
        return self._walk(self._tree.root(scope), packed)

    def below(self, slot: int, packed: bytes) -> list[int]:
        """Return the slots of a run below a slot that can be read, all of it; else none."""
        path = self._walk(slot, packed)
        is_whole = len(path) * self._num_bytes == len(packed) and not any(each in self._tree.pending for each in path)
        return path if is_whole else []

    def _walk(self, node: int | None, packed: bytes) -> list[int]:
        tree, path = self._tree, list[int]()
        while node is not None and (len(path) + 1) * self._num_bytes <= len(packed):
            node = tree.find(tree.key_at(node, packed, len(path)))
            if node is not None:
                path.append(node)
        return path

    def find(self, scope: bytes, packed: bytes) -> list[int]:
        """Return the slots of the longest run of these tokens that can be read."""
        path, pending = self.path(scope, packed), self._tree.pending
        return path if not pending else path[: next((i for i, slot in enumerate(path) if slot in pending), len(path))]

    def record(self, path: Sequence[int], index: int, scope: bytes, packed: bytes) -> StoredBlock:
        """Return the record of the block in path[index], of a run."""
        parent = path[index - 1] if index else NO_PARENT
        return StoredBlock(path[index], parent, packed[index * self._num_bytes : (index + 1) * self._num_bytes], scope)

    def touch(self, path: Sequence[int]) -> None:
        """Count a use of a path from its root on: its slots are the last to be evicted."""
        for slot in reversed(path):
            if slot in self._order:
                self._order.move_to_end(slot)

    # --- writing --------------------------------------------------------------------------------------------------

    def add(self, path: list[int], scope: bytes, packed: bytes) -> int | None:
        """Add the block of a run that comes behind the end of its stored path; append its slot to the path.

        Its bytes are being written until `end_write`. Evicts a leaf where all slots are taken; returns None, and
        changes nothing, where that cannot be done: the path itself, or what is being moved, takes them all. `touch`
        the path before the first and after the last of several calls.
        """
        if not self._free and not self._evict(keep=path[-1] if path else NONE):
            return None
        slot, tree = heappop(self._free), self._tree
        node = path[-1] if path else tree.open_root(scope)
        tree.insert(node, tree.key_at(node, packed, len(path)), slot)
        tree.pending.add(slot)
        self._order[slot] = None
        self.hold([slot])
        path.append(slot)
        return slot

    def _evict(self, keep: int) -> bool:
        """Remove the least recently used leaf. False if it is `keep`, or held, or no leaf."""
        slot = next(iter(self._order), keep)
        if slot == keep or slot in self._held or self._tree.has_children(slot):
            return False
        self.remove(slot)
        self.num_evicted += 1
        return True

    def end_write(self, slot: int, *, is_ok: bool) -> None:
        """End the write of a slot; what could not be written is removed, with all below it."""
        self.release([slot])
        if slot in self._tree.pending:
            self._tree.pending.discard(slot)
            if not is_ok:
                self.remove(slot)

    def remove(self, slot: int) -> None:
        """Remove a block and all below it: their records are forgotten. Nothing happens if it is there no more."""
        if slot not in self._order:
            return
        for each in self._tree.remove_all_below(slot):
            del self._order[each]
            self.forgotten.append(each)
            if each in self._held:
                self._dead.add(each)
            else:
                heappush(self._free, each)

    def take_forgotten(self) -> list[int]:
        """Return, once, the slots with records that count no more: to be removed before any of them is written."""
        forgotten, self.forgotten = self.forgotten, []
        return forgotten

    # --- reading and writing ----------------------------------------------------------------------------------------

    def hold(self, slots: Iterable[int]) -> None:
        """Keep the bytes of slots while they are moved."""
        self._held.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """End a hold of slots."""
        for slot in slots:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
                if slot in self._dead:
                    self._dead.discard(slot)
                    heappush(self._free, slot)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that the tree is sound, that children come before parents, and that no slot is lost or doubled."""
        for _ in self.checking():
            pass

    def checking(self) -> Iterator[None]:
        """Check in slices."""
        yield from self._tree.checking()
        assert len(self._tree) == len(self._order), f"{len(self._tree)} nodes, {len(self._order)} in order"
        seen, order = set[int](), iter(self._order)
        while slots := list(islice(order, 2048)):
            for slot in slots:
                assert slot in self._tree, f"slot {slot} is in the order, not in the tree"
                late = [child for child in self._tree.children(slot) if child not in seen]
                assert not late, f"slots {late} come behind their parent {slot}"
                seen.add(slot)
            yield
        slots = sorted([*self._order, *self._free, *self._dead])
        assert slots == list(range(self.num_slots)), f"slots are lost or doubled: {slots}"
        assert self._dead <= self._held.keys(), "a removed slot without a hold is not free"
        assert self._tree.pending <= self._held.keys(), "a slot is being written without a hold"
        yield
