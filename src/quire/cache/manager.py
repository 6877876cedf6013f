"""KVCacheManager: the only door through which the scheduler touches memory.

Knows sequences by id, and by the tokens under which their blocks can be found again. fork, append and free are all that
decoding algorithms need (Kwon et al. 2023, section 5.2). No call waits, and a call that fails changes nothing.

A step is what lies between two calls of `end_step`: each sequence appends at most once in it.
"""

from collections import Counter
from collections.abc import Sequence

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, BlockTable, TableUpdate, blocks_for
from quire.cache.prefix_cache import NO_MATCH, Path, PrefixCache, PrefixMatch
from quire.cache.prefix_tree import NONE, PrefixTree, Scope
from quire.core.config import CacheConfig
from quire.core.outputs import KVStats
from quire.core.plan import BlockCopy


class _Tables(dict[int, BlockTable]):
    """Block tables by sequence id; an id without one is an error with a name."""

    def __missing__(self, seq_id: int) -> BlockTable:
        raise ValueError(f"sequence {seq_id} has no block table")


class KVCacheManager:
    """The block tables of all running sequences, over one pool, and the prefixes that can be found in it."""

    __slots__ = (
        "_num_copied", "_num_found", "_num_queried", "_paths", "_pool", "_prefixes", "_tables", "_tree", "_window",
        "block_size", "num_blocks",
    )

    def __init__(self, config: CacheConfig) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self._window = config.sliding_window
        self._tree = PrefixTree(config.num_blocks, config.block_size) if config.enable_prefix_caching else None
        self._pool = BlockPool(config.num_blocks, self._tree)
        self._prefixes = None if self._tree is None else PrefixCache(self._pool, self._tree)
        self._tables = _Tables()
        self._paths: dict[int, Path] = {}     # of sequences whose blocks may be found by others
        self._num_copied = 0                  # blocks, since start
        self._num_queried = self._num_found = 0  # prompt tokens, since start

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an append can take, cached ones among them."""
        return self._pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens of one sequence that shares nothing."""
        return blocks_for(num_tokens, self.block_size)

    # --- sequences ------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], stop: int, scope: Scope = None) -> PrefixMatch:
        """Return what is cached of token_ids[:stop] in a scope. Take it before the next call that changes anything."""
        return NO_MATCH if self._prefixes is None else self._prefixes.match(token_ids, stop, scope)

    def create(
        self,
        seq_id: int,
        token_ids: list[int] | None = None,
        scope: Scope = None,
        match: PrefixMatch = NO_MATCH,
    ) -> BlockCopy | None:
        """Begin a sequence, with the tokens of a match or with an empty table. ValueError if the id is taken.

        Returns the copy, if any, that has to be made before the forward pass of this step; for want of blocks, the
        match's tokens that need one are left out. `token_ids` is the list of all its known tokens, which its owner
        extends; without it, the sequence's blocks cannot be found by others.
        """
        self._refuse_taken(seq_id)
        table = self._tables[seq_id] = BlockTable(self._pool, self.block_size)
        if self._prefixes is None or token_ids is None:
            return None
        table.begin(match.blocks, match.num_tokens - match.num_inside)
        self._paths[seq_id] = Path(token_ids, scope, len(match.blocks))
        return None if match.source == NONE else self._copy_inside(table, match.source, match.num_inside)

    def append(self, seq_id: int, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens; return what changed in the sequence's table, None if nothing did.

        Blocks that have left the sliding window are given up first; columns that become NULL_BLOCK that way are no
        part of the update. Raises OutOfBlocksError without giving a slot when the pool lacks blocks.
        """
        table = self._tables[seq_id]
        if self._window is not None:
            self._drop_unseen(seq_id, table, self._window)
        update = table.append(count)
        if update is not None:
            self._note_update(seq_id, table, update, count)
        return update

    def fork(self, parent_id: int, child_id: int, token_ids: list[int] | None = None) -> None:
        """Begin a sequence with the tokens of another: all blocks shared, none taken. ValueError if the id is taken.

        `token_ids`: the child's own list, as in `create`.
        """
        self._refuse_taken(child_id)
        self._tables[child_id] = self._tables[parent_id].fork()
        path = self._paths.get(parent_id)
        if path is not None and token_ids is not None:
            self._paths[child_id] = Path(token_ids, path.scope, path.num_blocks)

    def free(self, seq_id: int, num_computed: int = 0) -> None:
        """End a sequence: give up its share of every block. Those of its first `num_computed` tokens can be found."""
        table = self._tables[seq_id]
        path = self._paths.pop(seq_id, None)
        if self._prefixes is not None and path is not None:
            self._prefixes.withdraw(path, table)
            self._prefixes.publish(path, table, num_computed)
        table.free()
        del self._tables[seq_id]

    def end_step(self) -> None:
        """Take down that the step under way is over: what it has computed can be found from now on.

        A step that has failed is over, too, when all sequences that appended in it have been freed.
        """
        if self._prefixes is not None:
            self._prefixes.end_step()

    def publish(self) -> None:
        """Let all that has been computed be found, and give up what is there twice.

        For the beginning of a step, before any sequence appends, when somebody wants to look or blocks are short.
        """
        if self._prefixes is None:
            return
        for seq_id, path in self._paths.items():
            table = self._tables[seq_id]
            if path.num_blocks < table.num_tokens // self.block_size:
                self._prefixes.publish(path, table, table.num_tokens)

    def note_query(self, num_queried: int, num_found: int) -> None:
        """Count the tokens of a prompt that were looked up, and those that need not be computed."""
        if self._prefixes is None:
            return
        self._num_queried += num_queried
        self._num_found += num_found

    def block_ids(self, seq_id: int) -> list[int]:
        """Return a copy of the sequence's block table. NULL_BLOCK stands where a block has left the sliding window."""
        return self._tables[seq_id].blocks.copy()

    def num_tokens(self, seq_id: int) -> int:
        """Return how many tokens of the sequence have slots."""
        return self._tables[seq_id].num_tokens

    # --- seen -----------------------------------------------------------------------------------------------------

    def stats(self) -> KVStats:
        """Return the state of the cache now, every token with a slot counted as computed. Linear in the sequences."""
        pool, num_blocks_by_owners = self._pool, self._pool.count_blocks_by_owners()
        del num_blocks_by_owners[0]
        return KVStats(
            block_size=self.block_size,
            total_blocks=self.num_blocks,
            used_blocks=self.num_blocks - pool.num_free_blocks,
            cached_blocks=pool.num_cached_blocks,
            free_blocks=pool.num_free_blocks - pool.num_cached_blocks,
            shared_blocks=sum(num for owners, num in num_blocks_by_owners.items() if owners > 1),
            num_sequences=len(self._tables),
            tail_waste_slots=self._tail_waste_slots(),
            ref_counts=_histogram(num_blocks_by_owners),
            copied_blocks=self._num_copied,
            evicted_blocks=pool.num_evicted,
            prefix_queries_tokens=self._num_queried,
            prefix_hits_tokens=self._num_found,
        )

    def check(self) -> None:
        """Assert every invariant: tables, pool and tree sound, reference counts equal to holders, nothing leaked.

        A block that several tables hold must hold equally many tokens of each: none may write while others share.
        """
        self._pool.check()
        holders = Counter[int]() if self._prefixes is None else Counter(self._prefixes.sources)
        filled: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            table.check()
            for column, block in enumerate(table.blocks):
                if block == NULL_BLOCK:
                    continue
                holders[block] += 1
                num_filled = min(self.block_size, table.num_filled - column * self.block_size)
                assert filled.setdefault(block, num_filled) == num_filled, f"sequence {seq_id} wrote into {block}"
        counts = {block: self._pool.ref_count(block) for block in range(self.num_blocks)}
        assert {block: count for block, count in counts.items() if count} == holders, f"{counts} but held {holders}"
        self._check_prefixes()

    def _check_prefixes(self) -> None:
        """Assert that the tree is sound, holds what the paths say, and has no pending node without an owner."""
        if self._prefixes is None or self._tree is None:
            return
        self._tree.check()
        for seq_id, path in self._paths.items():
            self._prefixes.check(path, self._tables[seq_id])
        ownerless = [block for block in self._tree.pending if self._pool.ref_count(block) == 0]
        assert not ownerless, f"nobody computes the pending blocks {ownerless}"

    def _note_update(self, seq_id: int, table: BlockTable, update: TableUpdate, count: int) -> None:
        """Count a copy; let others know which blocks a prefill is about to fill."""
        if update.copy is not None:
            self._num_copied += 1
        path = self._paths.get(seq_id) if count > 1 else None
        if self._prefixes is not None and path is not None:
            self._prefixes.pend(path, table)

    def _drop_unseen(self, seq_id: int, table: BlockTable, window: int) -> None:
        """Give up the blocks that no query will see again: the next one looks back on `window` - 1 tokens."""
        first_seen = table.num_tokens - window + 1
        path = self._paths.get(seq_id)
        if self._prefixes is not None and path is not None and path.num_blocks < first_seen // self.block_size:
            self._prefixes.publish(path, table, table.num_tokens)
        table.drop_before(first_seen)

    def _copy_inside(self, table: BlockTable, source: int, count: int) -> BlockCopy | None:
        """Append the first `count` tokens of a block by copying it. None, and nothing appended, for want of blocks."""
        assert self._prefixes is not None
        self._prefixes.hold(source)
        try:
            update = table.append(count)
        except OutOfBlocksError:
            return None
        assert update is not None
        self._num_copied += 1
        return BlockCopy(source, update.blocks[0])

    def _refuse_taken(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} already has a block table")

    def _tail_waste_slots(self) -> int:
        """Count the empty slots of blocks in use. All are in last blocks; a shared one is filled alike for all."""
        tables = [table for table in self._tables.values() if table.blocks]
        return sum({table.blocks[-1]: -table.num_filled % self.block_size for table in tables}.values())


def _histogram(num_blocks_by_owners: Counter[int]) -> dict[str, int]:
    """Return how many blocks have 1, 2, 3-4, 5-8, 9+ owners."""
    labels = ("1", "2", "3-4", "5-8", "9+")
    histogram = dict.fromkeys(labels, 0)
    for owners, num_blocks in num_blocks_by_owners.items():
        octave = (owners - 1).bit_length()  # the upper ends 1, 2, 4, 8 are powers of two
        histogram[labels[min(octave, len(labels) - 1)]] += num_blocks
    return histogram
