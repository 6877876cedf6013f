"""Pins: prefixes that are kept until they are unpinned (the shared prefix of Kwon et al. 2023, section 4.4).

A pin is a fork of the table of the sequence that has computed the prefix; no token is appended to it. Its full blocks
are in the prefix tree, and are not evicted, for they have an owner. The tree knows full blocks only: what
stands in a last block that is not full, its tail, is found here, by what comes before it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.cache.block_table import BlockTable
from quire.cache.block_view import count_holders
from quire.cache.prefix_tree import NONE, Scope, as_bytes, num_equal_tokens


class PinnedTable(NamedTuple):
    """A prefix that is kept, and its tail: the tokens behind its last full block, `before` (NONE: there is none)."""

    table: BlockTable
    token_ids: Sequence[int]
    scope: Scope
    before: int
    tail: bytes


class Pins(dict[int, PinnedTable]):
    """All pins, by ids that their owner gives. They are few, so a lookup of a tail visits all of them.

    What each step reports of them is counted when a pin comes or goes, linear in its own blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__()
        self._size = block_size
        self._num_holders = np.zeros(num_blocks, dtype=np.int32)  # pins of each block
        self.ids: tuple[int, ...] = ()
        self.num_blocks = 0                 # pinned, each counted once
        self.tails = Counter[int]()         # pins by last block, where it is not full
        self.num_empty_slots = 0            # without a token, in those blocks

    def add(self, pin_id: int, table: BlockTable, token_ids: Sequence[int], scope: Scope) -> None:
        """Pin the blocks of a table; its full blocks are in the tree. A tail that another pin has is stored once."""
        assert pin_id not in self, f"pin {pin_id} is here already"
        num_full = len(token_ids) // self._size
        before = table.columns[num_full - 1] if num_full else NONE
        pin = PinnedTable(table, token_ids, scope, before, as_bytes(token_ids[num_full * self._size :]))
        twin = next((each for each in self.values() if each[2:] == pin[2:]), None)
        if pin.tail and twin is not None and twin.table.columns[-1] != table.columns[-1]:
            table.replace(len(table.columns) - 1, twin.table.columns[-1])
        self[pin_id] = pin
        self._count(table, 1)

    def unpin(self, pin_id: int) -> bool:
        """Remove a pin, between two steps; False if there is none.

        Its full blocks without another owner are cached, its tail is free.
        """
        if pin_id not in self:
            return False
        table = self.pop(pin_id).table
        self._count(table, -1)
        table.free()
        return True

    def count_empty_slots(self, last_blocks: Mapping[int, int]) -> int:
        """Return the empty slots of pinned blocks and of some blocks, given with their empty slots.

        Linear in the blocks given, not in the pins.
        """
        return self.num_empty_slots + sum(num for block, num in last_blocks.items() if block not in self.tails)

    def longest_match_inside(self, before: int, scope: Scope, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return (block, number of its first tokens that `token_ids` begins with) of the tail with the most.

        `before`: the full block before it, or NONE. (NONE, 0) if no tail has any.
        """
        pins = [pin for pin in self.values() if pin.before == before and pin.scope == scope and pin.tail]
        if not pins:
            return NONE, 0
        wanted = as_bytes(token_ids)
        num_equal, block = max((num_equal_tokens(wanted, pin.tail), pin.table.columns[-1]) for pin in pins)
        return (block, num_equal) if num_equal else (NONE, 0)

    def _count(self, table: BlockTable, change: int) -> None:
        """Count the table of a pin that has been added (1) or removed (-1)."""
        self.ids = tuple(self)
        held, num_holders = table.as_array(), self._num_holders
        num_held = np.count_nonzero(num_holders[held])
        num_holders[held] += change
        self.num_blocks += int(np.count_nonzero(num_holders[held]) - num_held)
        if num_empty := self._num_empty(table):
            num_before = self.tails[last := table.columns[-1]]
            self.tails[last] += change
            if not num_before or not self.tails[last]:  # all pins with a tail fill it alike
                self.num_empty_slots += change * num_empty
            if not self.tails[last]:
                del self.tails[last]

    def _num_empty(self, table: BlockTable) -> int:
        """Return the empty slots of a pin; the block of a cut one may be filled further."""
        return 0 if table.is_cut else -table.num_filled % self._size

    def check(self) -> None:
        """Assert that blocks are counted, that pins have their tokens, and that no tail is stored twice."""
        num_holders = count_holders((pin.table for pin in self.values()), len(self._num_holders))
        assert (self._num_holders == num_holders).all(), f"pins of blocks: {num_holders}, not {self._num_holders}"
        num_blocks = np.count_nonzero(num_holders)
        assert self.num_blocks == num_blocks, f"{self.num_blocks} pinned blocks were counted, not {num_blocks}"
        with_tails = [pin.table for pin in self.values() if self._num_empty(pin.table)]
        empty = {table.columns[-1]: self._num_empty(table) for table in with_tails}
        assert self.tails == Counter(table.columns[-1] for table in with_tails), f"tails {self.tails}"
        assert self.num_empty_slots == sum(empty.values()), f"{self.num_empty_slots} empty slots, not {empty}"
        assert self.ids == tuple(self), f"ids {self.ids}"
        assert all(len(pin.token_ids) == pin.table.num_tokens for pin in self.values()), "a pin of other tokens"
        tails = {(pin[2:], pin.table.columns[-1]) for pin in self.values() if pin.tail}
        assert len(tails) == len({place for place, _ in tails}), f"a tail is stored twice: {tails}"
