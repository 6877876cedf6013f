"""Pins: prefixes that are kept until somebody lets go of them (the shared prefix of Kwon et al. 2023, section 4.4).

A pin is a fork of the table of the sequence that has computed the prefix; nobody appends to it. Its full blocks are in
the prefix tree like all others, and are not given up, for they have an owner. The tree knows full blocks only: what
stands in a last block that is not full, its tail, is found here, by what comes before it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.cache.block_table import BlockTable
from quire.cache.prefix_tree import NONE, Scope, as_bytes, num_equal_tokens


class Pin(NamedTuple):
    """A prefix that is kept."""

    table: BlockTable
    token_ids: list[int]
    scope: Scope


class Pins:
    """All pins, by ids that their owner gives."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._pins: dict[int, Pin] = {}
        self._num_pins_of = Counter[int]()                             # by block
        self._tails: dict[tuple[int, Scope], dict[bytes, int]] = {}    # tokens -> block, by the block before and scope

    def __iter__(self) -> Iterator[int]:
        """Yield the ids."""
        return iter(self._pins)

    def __len__(self) -> int:
        """Count the pins."""
        return len(self._pins)

    def __contains__(self, pin_id: int) -> bool:
        """Whether a pin is here."""
        return pin_id in self._pins

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._num_pins_of)

    def num_tokens(self, pin_id: int) -> int:
        """Return how many tokens a pin has."""
        return len(self._pins[pin_id].token_ids)

    def values(self) -> Iterator[Pin]:
        """Yield the pins."""
        return iter(self._pins.values())

    def add(self, pin_id: int, pin: Pin) -> None:
        """Keep a pin, whose full blocks are in the tree. A tail that another one has is stored once."""
        assert pin_id not in self._pins, f"pin {pin_id} is here already"
        table = pin.table
        place, tail = self._tail(pin)
        if tail:
            twin = self._tails.setdefault(place, {}).setdefault(tail, table.blocks[-1])
            if twin != table.blocks[-1]:
                table.replace(len(table.blocks) - 1, twin)
        self._pins[pin_id] = pin
        self._num_pins_of.update(table.blocks)

    def remove(self, pin_id: int) -> None:
        """Let a pin go: full blocks without another owner are cached, its tail is free."""
        pin = self._pins.pop(pin_id)
        self._num_pins_of.subtract(pin.table.blocks)
        self._num_pins_of = +self._num_pins_of
        place, tail = self._tail(pin)
        if tail and pin.table.blocks[-1] not in self._num_pins_of:
            del self._tails[place][tail]
            if not self._tails[place]:
                del self._tails[place]
        pin.table.free()

    def longest_match_inside(self, before: int, scope: Scope, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return (block, number of its first tokens that `token_ids` begins with) of the tail with the most.

        `before`: the full block before it, or NONE. (NONE, 0) if no tail has any. There are as many as pins at most.
        """
        tails = self._tails.get((before, scope))
        if tails is None:
            return NONE, 0
        wanted = as_bytes(token_ids)
        num_equal, block = max((num_equal_tokens(wanted, tail), block) for tail, block in tails.items())
        return (block, num_equal) if num_equal else (NONE, 0)

    def _tail(self, pin: Pin) -> tuple[tuple[int, Scope], bytes]:
        """Return what comes before the tail, and its tokens: none if the last block is full."""
        num_full = pin.table.num_tokens // self._size
        before = pin.table.blocks[num_full - 1] if num_full else NONE
        return (before, pin.scope), as_bytes(pin.token_ids[num_full * self._size :])

    def check(self) -> None:
        """Assert that blocks are counted and tails are listed as the pins have them."""
        blocks = Counter(block for pin in self.values() for block in pin.table.blocks)
        assert blocks == self._num_pins_of, f"pins hold {blocks}, but {self._num_pins_of} were counted"
        listed = {(place, tail, block) for place, tails in self._tails.items() for tail, block in tails.items()}
        tails = {(*self._tail(pin), pin.table.blocks[-1]) for pin in self.values()}
        assert listed == {each for each in tails if each[1]}, f"tails {tails}, but listed {listed}"
        assert all(len(pin.token_ids) == pin.table.num_tokens for pin in self.values()), "a pin of other tokens"
