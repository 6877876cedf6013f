"""KVCacheManager: the only door through which the scheduler touches memory.

Knows sequences by id and nothing else about them. fork, append and free are all that decoding algorithms need
(Kwon et al. 2023, section 5.2). No call waits, and a call that fails changes nothing.
"""

from collections import Counter

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import NULL_BLOCK, BlockTable, TableUpdate, blocks_for
from quire.core.config import CacheConfig
from quire.core.outputs import KVStats


class _Tables(dict[int, BlockTable]):
    """Block tables by sequence id; an id without one is an error with a name."""

    def __missing__(self, seq_id: int) -> BlockTable:
        raise ValueError(f"sequence {seq_id} has no block table")


class KVCacheManager:
    """The block tables of all running sequences, over one pool."""

    __slots__ = ("_num_copied", "_pool", "_tables", "_window", "block_size", "num_blocks")

    def __init__(self, config: CacheConfig) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self._window = config.sliding_window
        self._pool = BlockPool(config.num_blocks)
        self._tables = _Tables()
        self._num_copied = 0  # blocks, since start

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an append can take."""
        return self._pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens of one sequence that shares nothing."""
        return blocks_for(num_tokens, self.block_size)

    def create(self, seq_id: int) -> None:
        """Begin a sequence: an empty table that holds no block. ValueError if the id is taken."""
        self._refuse_taken(seq_id)
        self._tables[seq_id] = BlockTable(self._pool, self.block_size)

    def append(self, seq_id: int, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens; return what changed in the sequence's table, None if nothing did.

        Blocks that have left the sliding window go back to the pool first; columns that become NULL_BLOCK that way
        are not part of the update. Raises OutOfBlocksError without giving a slot when the pool lacks blocks.
        """
        table = self._tables[seq_id]
        if self._window is not None:
            table.drop_before(table.num_tokens - self._window + 1)  # the next query looks back on window - 1 tokens
        update = table.append(count)
        if update is not None and update.copy is not None:
            self._num_copied += 1
        return update

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begin a sequence with the tokens of another: all blocks shared, none taken. ValueError if the id is taken."""
        self._refuse_taken(child_id)
        self._tables[child_id] = self._tables[parent_id].fork()

    def free(self, seq_id: int) -> None:
        """End a sequence: give up its share of every block."""
        self._tables[seq_id].free()
        del self._tables[seq_id]

    def block_ids(self, seq_id: int) -> list[int]:
        """Return a copy of the sequence's block table. NULL_BLOCK stands where a block has left the sliding window."""
        return self._tables[seq_id].blocks.copy()

    def num_tokens(self, seq_id: int) -> int:
        """Return how many tokens of the sequence have slots."""
        return self._tables[seq_id].num_tokens

    def stats(self) -> KVStats:
        """Return the state of the cache now, every token with a slot counted as computed. Linear in the sequences."""
        num_blocks_by_owners = self._pool.count_blocks_by_owners()
        num_free = num_blocks_by_owners.pop(0, 0)
        return KVStats(
            block_size=self.block_size,
            total_blocks=self.num_blocks,
            used_blocks=self.num_blocks - num_free,
            cached_blocks=0,
            free_blocks=num_free,
            shared_blocks=sum(num for owners, num in num_blocks_by_owners.items() if owners > 1),
            num_sequences=len(self._tables),
            tail_waste_slots=self._tail_waste_slots(),
            ref_counts=_histogram(num_blocks_by_owners),
            copied_blocks=self._num_copied,
        )

    def check(self) -> None:
        """Assert every invariant: tables and pool sound, reference counts equal to holders, nothing leaked.

        A block that several tables hold must hold equally many tokens of each: none may write while others share.
        """
        self._pool.check()
        holders: Counter[int] = Counter()
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            table.check()
            for column, block in enumerate(table.blocks):
                if block == NULL_BLOCK:
                    continue
                holders[block] += 1
                num_filled = min(self.block_size, table.num_tokens - column * self.block_size)
                assert filled.setdefault(block, num_filled) == num_filled, f"sequence {seq_id} wrote into {block}"
        counts = {block: self._pool.ref_count(block) for block in range(self.num_blocks)}
        assert {block: count for block, count in counts.items() if count} == holders, f"{counts} but held {holders}"

    def _refuse_taken(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} already has a block table")

    def _tail_waste_slots(self) -> int:
        """Count the empty slots of blocks in use. All are in last blocks; a shared one is filled alike for all."""
        tables = [table for table in self._tables.values() if table.blocks]
        return sum({table.blocks[-1]: -table.num_tokens % self.block_size for table in tables}.values())


def _histogram(num_blocks_by_owners: Counter[int]) -> dict[str, int]:
    """Return how many blocks have 1, 2, 3-4, 5-8, 9+ owners."""
    labels = ("1", "2", "3-4", "5-8", "9+")
    histogram = dict.fromkeys(labels, 0)
    for owners, num_blocks in num_blocks_by_owners.items():
        octave = (owners - 1).bit_length()  # the upper ends 1, 2, 4, 8 are powers of two
        histogram[labels[min(octave, len(labels) - 1)]] += num_blocks
    return histogram
