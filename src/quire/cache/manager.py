"""KVCacheManager: the scheduler's only interface to memory.

Knows sequences by id, and by the tokens under which their blocks can be found again. fork, append and free are all that
decoding algorithms need (Kwon et al. 2023, section 5.2); whole requests may be swapped out and in. No call waits, and a
call that fails changes nothing.

A step is what lies between two calls of `end_step`: each sequence appends at most once in it.

`UncachedManager` is that of a model that keeps no keys and values. The scheduler sees no difference: a table counts its
tokens and never has a column, and nothing waits for blocks, is preempted for them or finds a prefix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from quire.cache.block_pool import OutOfBlocksError, run_to_the_end
from quire.cache.block_table import BlockTable, TableUpdate, blocks_for
from quire.cache.block_view import checking_blocks, count_blocks, histogram, view_all, view_blocks
from quire.cache.loads import Loads
from quire.cache.prefix_tree import NO_MATCH, NONE, PrefixMatch, Scope
from quire.cache.prefixes import Prefixes
from quire.cache.states import States
from quire.cache.swap_space import CacheSwap, SwapSpace
from quire.core.block_map import BlockEntry, BlockOverview, Tier
from quire.core.config import CacheConfig
from quire.core.outputs import KVStats
from quire.core.plan import BlockCopy


class _Tables(dict[int, BlockTable]):
    """Block tables by sequence id; an id without one is an error with a name."""

    def __missing__(self, seq_id: int) -> BlockTable:
        raise ValueError(f"sequence {seq_id} has no block table")


class KVCacheManager:
    """The block tables of all running sequences, over one pool, and the prefixes that can be found in it.

    `swap` moves sequences to `swap_space` and back, which may have no block. `prefixes`: a prefix cache; without it
    none is found. `pins` are the prefixes that it keeps.
    """

    copies_forks = False     # whether `take_copies` returns anything: a fork shares all blocks

    __slots__ = (
        "_num_copied", "_pool", "_sources", "_tables", "_window", "block_size", "has_window", "leases", "loads",
        "num_blocks", "pins", "prefixes", "states", "swap", "swap_space",
    )

    def __init__(self, config: CacheConfig, prefixes: Prefixes | None = None) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self._window = config.sliding_window
        self.has_window = self._window is not None   # blocks are released as they leave it
        self.prefixes = Prefixes(config) if prefixes is None else prefixes
        self.pins = self.prefixes.pins
        self._pool = self.prefixes.pool
        self._tables = _Tables()
        self.swap_space = SwapSpace(config.num_swap_blocks)
        self.swap = CacheSwap(self.swap_space, self._tables, self.prefixes)
        has_states = config.num_state_slots > 0
        self.states = States(config, self._tables, self.prefixes.snapshots) if has_states else None
        self._sources: list[int] = []            # blocks that the step under way copies from, held until it is over
        self._num_copied = 0                     # blocks, since start
        self.loads: Loads | None = None          # None: nothing is loaded from elsewhere
        self.leases: dict[int, BlockTable] = {}  # request id: blocks that a load fills, and those before

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an append can take, cached ones among them."""
        return self._pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens of one sequence that shares nothing."""
        return blocks_for(num_tokens, self.block_size)

    # --- sequences ------------------------------------------------------------------------------------------------

    def __contains__(self, seq_id: int) -> bool:
        """Return whether a sequence has a block table, in the cache or in the swap space."""
        return seq_id in self._tables or seq_id in self.swap_space

    def match(
        self, token_ids: Sequence[int], stop: int, scope: Scope = None, like: int | None = None
    ) -> PrefixMatch:
        """Return what is cached of token_ids[:stop] in a scope. Take it before the next call that changes anything.

        `like`: a sequence, there or not, that may begin with the same tokens; its blocks are found without a walk.
        """
        table = None if like is None or self._window is not None else self._tables.get(like)
        return self.prefixes.match(token_ids, stop, scope, table)

    def create(
        self,
        seq_id: int,
        token_ids: Sequence[int] | None = None,
        scope: Scope = None,
        match: PrefixMatch = NO_MATCH,
        *,
        keeps_all: bool = False,
        num_reserved: int = 0,
    ) -> BlockCopy | None:
        """Begin a sequence, with the tokens of a match or with an empty table. ValueError if the id is taken.

        Returns the copy, if any, that has to be made before the forward pass of this step; for want of blocks, the
        match's tokens that need one are left out. `token_ids` is the list of all its known tokens, which its owner
        extends; without it, its blocks cannot be found by other sequences. `keeps_all`: it will be pinned, so it
        holds its blocks also when they have left the sliding window. `num_reserved`: tokens that it will have at most.
        """
        self._refuse_taken(seq_id)
        table = self._tables[seq_id] = self._new_table(num_reserved)
        if token_ids is None or not self.prefixes.can_be_found:
            if self.states is not None:
                self.states.begin(seq_id, NO_MATCH)
            return None
        table.begin(match.blocks, match.num_tokens - match.num_inside)
        self.prefixes.begin(table, token_ids, scope, len(match.blocks), keeps_all=keeps_all)
        if self.states is not None:
            self.states.begin(seq_id, match)
        return None if match.source == NONE else self._copy_inside(table, match.source, match.num_inside)

    def append(
        self, seq_id: int, count: int, *, can_be_awaited: bool = True, keeps_window: bool = False
    ) -> TableUpdate | None:
        """Give slots to `count` more tokens; return what changed in the sequence's table, None if nothing did.

        `can_be_awaited`: a request that starts with the blocks that this fills may wait for the end of the step.
        False for a step that is planned before another is over: that one's end is not this one's. `keeps_window`: no
        block is released, because earlier tokens of the same step still attend to blocks that these do not need.

        Blocks that have left the sliding window are given up first; columns that become NULL_BLOCK that way are no
        part of the update. Raises OutOfBlocksError without giving a slot when the pool lacks blocks.
        """
        table = self._tables[seq_id]
        if not keeps_window and self.has_window:
            self.prefixes.drop_unseen([table])
        was_cut, update = table.is_cut, table.append(count)
        if update is not None:
            if update.copy is not None:
                self._num_copied += 1
                if was_cut:
                    self._hold(update.copy.src)     # the prefix cache may have been its only other reader
            if can_be_awaited and count > 1:
                # A prefill is to fill them; what decoding has filled before is found at once.
                self.prefixes.publish(table, table.num_tokens, num_computed=table.num_tokens - count)
        return update

    def append_where_room(self, seq_ids: Iterable[int]) -> tuple[list[int], dict[int, TableUpdate | None]]:
        """Append one token to each sequence if that takes no block, or to all if each needs a block of its own at most.

        Returns the places in `seq_ids` that are left for `append`, and the updates of tables by place.
        """
        tables = list(map(self._tables.__getitem__, seq_ids))
        if self.has_window:
            self.prefixes.drop_unseen(tables)
        full = BlockTable.append_where_room(tables)
        if not full:
            return full, {}
        grown = list(map(tables.__getitem__, full))
        if (blocks := BlockTable.append_blocks(grown)) is None:
            return full, {}
        updates: dict[int, TableUpdate | None] = {
            place: TableUpdate(len(table.columns) - 1, [block])
            for place, table, block in zip(full, grown, blocks, strict=True)
        }
        return [], updates

    def fork(self, parent_id: int, child_id: int, token_ids: Sequence[int] | None = None) -> None:
        """Begin a sequence with the tokens of another: all blocks shared, none taken. ValueError if the id is taken.

        `token_ids`: the child's own list, as in `create`.
        """
        self._refuse_taken(child_id)
        parent = self._tables[parent_id]
        child = self._tables[child_id] = parent.fork()
        self.prefixes.fork(parent, child, token_ids)
        if self.states is not None:
            self.states.fork(parent_id, child_id)

    def refork(self, parent_id: int, child_id: int, token_ids: Sequence[int] | None = None) -> None:
        """End a sequence and begin it again as a fork of another: `free`, then `fork`, but not findable.

        Costs what the two tables differ in: a beam that is replaced by another of the same prompt, a few columns.
        """
        child, parent = self._tables[child_id], self._tables[parent_id]
        self.prefixes.withdraw(child)
        child.become(parent)
        self.prefixes.fork(parent, child, token_ids)
        if self.states is not None:
            self.states.refork(parent_id, child_id)

    def take_copies(self) -> list[BlockCopy]:
        """Return, once, the copies that forks before this step have asked for."""
        return []

    def free(self, seq_id: int, num_computed: int = 0) -> None:
        """End a sequence, swapped out or not: give up its share of every block.

        The blocks of its first `num_computed` tokens can be found; but none that the step under way was to swap in.
        """
        if self.states is not None:
            self._free_state(self.states, seq_id, num_computed)
        if seq_id in self.swap_space:
            self.swap_space.free(seq_id)
        else:
            self.prefixes.free(self._tables[seq_id], num_computed)
            del self._tables[seq_id]

    def _free_state(self, states: States, seq_id: int, num_computed: int) -> None:
        """End the state of a sequence; its snapshots are found from now on with the blocks of its computed tokens."""
        if seq_id in self._tables:
            self.prefixes.withdraw(self._tables[seq_id])
            self.prefixes.publish(self._tables[seq_id], num_computed)
            states.settle(seq_id)
        states.free(seq_id)

    def swap_states_out(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Move the states of a group to the swap space, before its blocks: as `swap.swap_out`."""
        if self.states is None:
            return []
        for seq_id in seq_ids:
            self.prefixes.publish(self._tables[seq_id], self._tables[seq_id].num_tokens)
            self.states.settle(seq_id)
        return self.states.swap_out(seq_ids)

    def invalidate(self, seq_id: int) -> None:
        """Remove the sequence's unshared blocks from the prefix cache: their values may be NaN."""
        if seq_id in self._tables:
            self.prefixes.withdraw(self._tables[seq_id], only_pending=False)
            if self.states is not None:
                self.states.invalidate(seq_id)

    def pin(self, pin_id: int, seq_id: int) -> None:
        """Keep the blocks of a sequence until `unpin`, whatever becomes of it. Needs prefix caching.

        All of its tokens have been computed, and it holds all of its blocks. For the end of a step. Its last state is
        kept, too, as far as `States.keep` keeps it.
        """
        self.prefixes.pin(pin_id, self._tables[seq_id])
        if self.states is not None:
            self.states.settle(seq_id)
            self.states.keep(pin_id, self.pins[pin_id].table.columns)

    def unpin(self, pin_id: int) -> bool:
        """Release what a pin keeps, between two steps; False if there is none."""
        is_pin = self.pins.unpin(pin_id)
        if is_pin and self.states is not None:          # else the id may be that of a lease, which keeps a state, too
            self.states.end_keep(pin_id)
        return is_pin

    def end_step(self) -> None:
        """End the step under way: what it has computed can be found from now on.

        A step that has failed is over, too, when all sequences that appended in it have been freed.
        """
        self.prefixes.end_step()
        while self._sources:
            self._pool.release(self._sources.pop())
        if self.swap_space.sources:
            self.swap_space.end_step()
        if self.states is not None:
            self.states.end_step()

    def publish(self) -> None:
        """Publish all computed blocks to the prefix cache, and release duplicates.

        For the beginning of a step, before any sequence appends, when a prefix lookup follows or blocks are short.
        """
        self.prefixes.publish_all(self._tables.values())
        if self.states is not None:
            self.states.publish()

    def block_ids(self, seq_id: int) -> list[int]:
        """Return a copy of the sequence's block table. NULL_BLOCK stands where a block has left the sliding window."""
        return self._tables[seq_id].blocks

    def block_array(self, seq_id: int) -> Sequence[int]:
        """Return what `block_ids` does, as an array: a copy of memory, in microseconds for thousands of blocks."""
        return self._tables[seq_id].columns[:]

    def num_tokens(self, seq_id: int) -> int:
        """Return how many tokens of the sequence have slots."""
        return self._tables[seq_id].num_tokens

    def retract(self, seq_id: int, num_tokens: int) -> None:
        """Take back what a sequence has appended in the step under way: it has `num_tokens` again, all computed."""
        self._num_copied -= self.prefixes.retract(self._tables[seq_id], num_tokens)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Take back computed tokens of a sequence, swapped out or not: its first `num_tokens` stay.

        Between two steps, or at the end of one before `end_step`. Blocks behind the tokens are released, and leave the
        prefix cache unless other sequences hold them; copies that a step has made stay. A stored token that was to be
        computed once more goes, too: its owner may replace it. The owner of the token list truncates that as well.
        Raises ValueError, and changes nothing, if there are fewer tokens, or if the sliding window before the next
        token has lost a block: the tokens of the last append can always be taken back.
        """
        is_swapped = seq_id in self.swap_space
        table = self.swap_space.table(seq_id) if is_swapped else self._tables[seq_id]
        first_seen = num_tokens if self._window is None else max(0, num_tokens - self._window + 1)
        if not 0 <= num_tokens <= table.num_tokens or first_seen // self.block_size < table.num_dropped:
            raise ValueError(
                f"cannot keep {num_tokens} of {table.num_tokens} tokens, {table.num_dropped} blocks left the window"
            )
        if is_swapped:
            table.truncate(num_tokens)
        elif num_tokens < table.num_filled:
            self.prefixes.truncate(table, num_tokens)

    def rewind(self, seq_id: int) -> None:
        """Let the last computed token be computed once more, for its logits: `append(1)` says that it is stored.

        At the end of a step, before `end_step`. Takes and gives back no block.
        """
        self._tables[seq_id].rewind()

    # --- leases: see quire.cache.loads -----------------------------------------------------------------------------

    def lease(
        self, lease_id: int, token_ids: Sequence[int], scope: Scope, match: PrefixMatch, num_blocks: int, *,
        with_state: bool = False,
    ) -> None:  # fmt: skip
        """Hold the blocks of a match, and empty ones up to `num_blocks`, which are to be filled with the next tokens.

        `with_state`: and a slot for the state behind them. Raises OutOfBlocksError, and changes nothing, for want of
        blocks or of a slot.
        """
        table = self._new_table(0)
        table.begin(match.blocks, len(match.blocks) * self.block_size)
        self.prefixes.begin(table, token_ids, scope, len(match.blocks), keeps_all=True)
        num_needed = num_blocks - len(match.blocks)
        has_blocks = num_needed <= self.num_free_blocks
        if not has_blocks or (with_state and (self.states is None or not self.states.lease(lease_id))):
            table.free()
            raise OutOfBlocksError(f"need {num_needed} blocks of {self.num_free_blocks}, and a slot for a state")
        table.append(num_needed * self.block_size)
        self.leases[lease_id] = table

    def lease_computed(self, lease_id: int, seq_id: int, num_blocks: int) -> list[int] | None:
        """Hold the first blocks of a sequence that ends, which are filled, and return them.

        None, and nothing is held, if one has left its window, or the sequence is swapped out.
        """
        if seq_id not in self._tables or self._tables[seq_id].num_dropped:
            return None
        table = self._tables[seq_id].fork()
        self.prefixes.fork(self._tables[seq_id], table, None)
        table.truncate(num_blocks * self.block_size)
        self.leases[lease_id] = table
        return table.columns.tolist()

    def keep_state(self, lease_id: int, seq_id: int) -> int | None:
        """Keep the state behind the blocks that a lease holds of a sequence that ends; return its slot.

        None if there is none.
        """
        assert self.states is not None, "a state of a model that keeps none"
        num_blocks = len(self.leases[lease_id].columns)
        self.prefixes.publish(self._tables[seq_id], num_blocks * self.block_size)
        self.states.settle(seq_id)
        return self.states.keep(lease_id, self._tables[seq_id].columns[num_blocks - 1 : num_blocks])

    def leased_blocks(self, lease_id: int, start: int, stop: int) -> list[int]:
        """Return the block ids of a lease in columns [start, stop) of its table."""
        return self.leases[lease_id].columns[start:stop].tolist()

    def fill_lease(self, lease_id: int, num_blocks: int) -> None:
        """Let the first blocks of a lease be found: they are filled. For between two steps."""
        self.prefixes.publish(self.leases[lease_id], num_blocks * self.block_size)

    def publish_leased_state(self, lease_id: int) -> None:
        """Let the state behind the last block of a lease be found: it is filled, and so are the blocks."""
        assert self.states is not None, "a state of a model that keeps none"
        table = self.leases[lease_id]
        assert table.path is not None, "a lease without a path"
        if table.path.num_blocks == len(table.columns):
            self.states.publish_lease(lease_id, table.columns[-1])

    def trim_lease(self, lease_id: int, num_blocks: int) -> None:
        """Release the blocks of a lease but the first, which are filled, and the slot for a state."""
        if self.states is not None:
            self.states.end_lease(lease_id)
        self.leases[lease_id].truncate(num_blocks * self.block_size)

    def end_lease(self, lease_id: int) -> None:
        """Release all blocks of a lease, and its state; what can be found is cached."""
        if self.states is not None:
            self.states.end_lease(lease_id)
            self.states.end_keep(lease_id)
        table = self.leases.pop(lease_id)
        self.prefixes.free(table, table.num_tokens)

    # --- seen -----------------------------------------------------------------------------------------------------

    def stats(self) -> KVStats:
        """Return the state of the cache now, every token with a slot counted as computed. Linear in the sequences."""
        pool, num_blocks_by_owners = self._pool, self._pool.count_blocks_by_owners()
        del num_blocks_by_owners[0]
        stats = KVStats(
            block_size=self.block_size,
            total_blocks=self.num_blocks,
            used_blocks=self.num_blocks - pool.num_free_blocks,
            cached_blocks=pool.num_cached_blocks,
            free_blocks=pool.num_free_blocks - pool.num_cached_blocks,
            shared_blocks=sum(num for owners, num in num_blocks_by_owners.items() if owners > 1),
            pinned_blocks=self.pins.num_blocks,
            num_sequences=len(self._tables),
            tail_waste_slots=self._tail_waste_slots(),
            ref_counts=histogram(num_blocks_by_owners),
            copied_blocks=self._num_copied,
            evicted_blocks=pool.num_evicted,
            prefix_queries_tokens=self.prefixes.num_queried,
            prefix_hits_tokens=self.prefixes.num_found,
            states={} if self.states is None else self.states.stats(),
        )
        return self.swap_space.add_stats(stats)

    def view_blocks(self, first: int, count: int, tier: Tier = "kv") -> list[BlockEntry]:
        """Return what blocks [first, first + count) are, and their holders: a sequence by its id, a pin by -1 - id."""
        if tier == "swap":
            return self.swap_space.view_blocks(self.block_size, first, count)
        return view_blocks(self._pool, self._holders(), self.block_size, first, count, tier)

    def view_all(self, tier: Tier = "kv") -> BlockOverview:
        """Return all blocks of a tier in a few spans; holders as in `view_blocks`."""
        return self.swap_space.view_all() if tier == "swap" else view_all(self._pool, self._holders())

    def count_blocks(self, seq_ids: Iterable[int]) -> int:
        """Return how many blocks these sequences hold, each counted once. Linear in their columns."""
        return count_blocks((self._tables[seq_id] for seq_id in seq_ids), self.num_blocks)

    def check(self) -> None:
        """Assert every invariant: tables, pool and prefixes sound, reference counts equal to holders, no leak."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Do what `check` does in slices of about a millisecond. To be dropped when anything changes between two."""
        yield from checking_blocks(self._pool, self._holders(), self._held_besides(), self.block_size)
        yield from self.swap_space.checking()
        both = [seq_id for seq_id in self._tables if seq_id in self.swap_space]
        assert not both, f"sequences {both} are in the cache and in the swap space"
        yield from self.prefixes.checking()
        for table in (*self._tables.values(), *self.leases.values()):
            self.prefixes.check_path(table)
            yield
        if self.loads is not None:
            yield from self.loads.checking()
        if self.states is not None:
            self.states.check()

    def _new_table(self, num_reserved: int) -> BlockTable:
        return BlockTable(self._pool, self.block_size)

    def _held_besides(self) -> Iterable[int]:
        """Return the blocks that are held by no table: what the step under way copies from."""
        return self._sources

    def _copy_inside(self, table: BlockTable, source: int, count: int) -> BlockCopy | None:
        """Append the first `count` tokens of a block by copying it. None, and nothing appended, for want of blocks."""
        self._hold(source)
        try:
            update = table.append(count)
        except OutOfBlocksError:
            return None
        assert update is not None
        self._num_copied += 1
        return BlockCopy(source, update.blocks[0])

    def _hold(self, source: int) -> None:
        """Keep a block as it is until the step under way has copied from it."""
        self._pool.share(source)
        self._sources.append(source)

    def _refuse_taken(self, seq_id: int) -> None:
        if seq_id in self:
            raise ValueError(f"sequence {seq_id} already has a block table")

    def _holders(self) -> Mapping[int, BlockTable]:
        """Return the tables of sequences, by their ids, and of pins and leases, by `-1 - id`."""
        pinned = {-1 - pin_id: pin.table for pin_id, pin in self.pins.items()}
        leased = {-1 - lease_id: table for lease_id, table in self.leases.items()}
        return self._tables | pinned | leased if pinned or leased else self._tables

    def _tail_waste_slots(self) -> int:
        """Count the empty slots of blocks in use. All are in last blocks; a shared one is filled alike for all."""
        tables = [table for table in self._tables.values() if table.columns]
        last_blocks = {table.columns[-1]: -table.num_filled % self.block_size for table in tables}
        return self.pins.count_empty_slots(last_blocks)


class TokenCount(BlockTable):
    """A table without blocks."""

    __slots__ = ()

    def append(self, count: int) -> TableUpdate | None:
        """Count tokens."""
        self.num_tokens += count
        return None

    def truncate(self, num_tokens: int) -> None:
        """Take back tokens."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} tokens cannot stay of {self.num_tokens}"
        self.num_tokens = num_tokens

    def check(self) -> None:
        """Assert that no block is held."""
        assert not self.columns, f"blocks {self.columns} without a cache"
        assert self.num_tokens >= 0


class UncachedManager(KVCacheManager):
    """A manager of no blocks. `config`: of 0 blocks, without prefix caching and swap space."""

    __slots__ = ()

    def __init__(self, config: CacheConfig) -> None:
        assert not config.has_blocks, f"{config}"
        assert config.num_swap_blocks == 0, f"{config}"
        assert not config.enable_prefix_caching, f"{config}"
        super().__init__(config)

    def blocks_for(self, num_tokens: int) -> int:
        """Return 0: no token takes a block."""
        return 0

    def _new_table(self, num_reserved: int) -> TokenCount:
        return TokenCount(self._pool, self.block_size)
