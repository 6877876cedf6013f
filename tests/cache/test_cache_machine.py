"""Random lives of sequences in the cache, beside a model that is nothing but dicts.

The model names pages instead of blocks, counts owners by looking at every table, and keeps the bytes: what was
written where. So a test sees not only wrong counts but one sequence's tokens under another's. Hypothesis searches
and shrinks in the default run, the same examples each time. The long run draws operations from seeds
(support/fuzz_seeds.py).
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, TableUpdate
from quire.core.config import CacheConfig
from quire.scheduling.scheduler import make_cache
from support.fuzz_seeds import STEPS_PER_RUN, fuzz

MAX_SEQUENCES = 8
DROPPED = None


@dataclass
class ModelSequence:
    """What one sequence must hold: a value per position, a page per column, and the table as a worker sees it."""

    values: list[int] = field(default_factory=list)
    pages: list[int | None] = field(default_factory=list)
    worker_table: list[int] = field(default_factory=list)  # built from table updates alone

    def fork(self) -> "ModelSequence":
        return ModelSequence(self.values.copy(), self.pages.copy(), self.worker_table.copy())


class Twin:
    """The real cache and the model, taken through the same life."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None) -> None:
        self.cache = make_cache(CacheConfig(num_blocks, block_size, window))
        self.num_blocks, self.block_size, self.window = num_blocks, block_size, window
        self.sequences: dict[int, ModelSequence] = {}
        self.memory: dict[tuple[int, int], int] = {}  # (block, offset) -> value, as a worker would write them
        self.new_ids, self.new_pages, self.new_values = count(), count(), count()
        self.num_copies = 0

    def create(self) -> None:
        seq_id = next(self.new_ids)
        self.cache.create(seq_id)
        self.sequences[seq_id] = ModelSequence()

    def fork(self, parent_id: int) -> None:
        child_id = next(self.new_ids)
        self.cache.fork(parent_id, child_id)
        self.sequences[child_id] = self.sequences[parent_id].fork()

    def free(self, seq_id: int) -> None:
        self.cache.free(seq_id)
        del self.sequences[seq_id]

    def append(self, seq_id: int, num_new: int) -> None:
        """Append, or run out of blocks at exactly the point where the model does."""
        num_fresh = self._fresh_pages(seq_id, num_new)
        self._drop_pages(seq_id)
        if num_fresh > self.num_blocks - len(self._owners()):
            before = self.cache.num_tokens(seq_id)
            with pytest.raises(OutOfBlocksError):
                self.cache.append(seq_id, num_new)
            assert self.cache.num_tokens(seq_id) == before
            return
        self._write(seq_id, self.cache.append(seq_id, num_new), num_new)

    def append_one_to_each(self) -> None:
        """Append to all where no table changes, or each takes a block of its own, at once, then to the others."""
        seq_ids = sorted(self.sequences)
        left, updates = self.cache.append_where_room(seq_ids)
        for seq_id in seq_ids:
            self._drop_pages(seq_id)
        for place, seq_id in enumerate(seq_ids):
            if place in left:
                self.append(seq_id, 1)
            else:
                self._write(seq_id, updates.get(place), 1)

    def refuse_mistakes(self, seq_id: int) -> None:
        unknown = next(self.new_ids)
        for mistake in (
            lambda: self.cache.create(seq_id),
            lambda: self.cache.fork(seq_id, seq_id),
            lambda: self.cache.fork(unknown, next(self.new_ids)),
            lambda: self.cache.append(unknown, 1),
            lambda: self.cache.free(unknown),
        ):
            with pytest.raises(ValueError, match="block table"):
                mistake()

    def check(self) -> None:
        """The cache's own invariants, then everything that the model knows better."""
        self.cache.check()
        owners = self._owners()
        assert self.cache.num_free_blocks == self.num_blocks - len(owners)
        block_of_page: dict[int, int] = {}
        for seq_id, sequence in self.sequences.items():
            self._check_sequence(seq_id, sequence, block_of_page)
        assert len(set(block_of_page.values())) == len(owners), "two pages in one block"
        self._check_stats(owners)

    def _check_sequence(self, seq_id: int, sequence: ModelSequence, block_of_page: dict[int, int]) -> None:
        blocks = self.cache.block_ids(seq_id)
        assert self.cache.num_tokens(seq_id) == len(sequence.values)
        assert len(blocks) == len(sequence.pages)
        for block, page, seen_by_worker in zip(blocks, sequence.pages, sequence.worker_table, strict=True):
            if page is DROPPED:
                assert block == NULL_BLOCK
                continue
            assert block == seen_by_worker
            assert block_of_page.setdefault(page, block) == block, "one page in two blocks"
        for position, value in enumerate(sequence.values):
            column, offset = divmod(position, self.block_size)
            if sequence.pages[column] is not DROPPED:
                assert self.memory[blocks[column], offset] == value, f"position {position} of {seq_id} overwritten"

    def _check_stats(self, owners: Counter[int]) -> None:
        stats = self.cache.stats()
        tails = {s.pages[-1]: -len(s.values) % self.block_size for s in self.sequences.values() if s.pages}
        tails.pop(DROPPED, None)
        assert (stats.used_blocks, stats.free_blocks) == (len(owners), self.num_blocks - len(owners))
        assert stats.shared_blocks == sum(num > 1 for num in owners.values())
        assert stats.num_sequences == len(self.sequences)
        assert stats.tail_waste_slots == sum(tails.values())
        assert stats.tail_waste_slots < self.block_size * max(len(self.sequences), 1)
        assert sum(stats.ref_counts.values()) == len(owners)
        assert stats.copied_blocks == self.num_copies

    def _owners(self) -> Counter[int]:
        """Tables per page, for every page in use."""
        return Counter(p for s in self.sequences.values() for p in s.pages if p is not DROPPED)

    def _copies_last_page(self, sequence: ModelSequence) -> bool:
        return len(sequence.values) % self.block_size != 0 and self._owners()[sequence.pages[-1]] > 1

    def _fresh_pages(self, seq_id: int, num_new: int) -> int:
        sequence = self.sequences[seq_id]
        if num_new == 0:
            return 0
        num_columns = (len(sequence.values) + num_new - 1) // self.block_size + 1
        return num_columns - len(sequence.pages) + self._copies_last_page(sequence)

    def _drop_pages(self, seq_id: int) -> None:
        """Forget pages whose last position is more than window - 1 before the next query."""
        if self.window is None:
            return
        sequence = self.sequences[seq_id]
        for column in range(len(sequence.pages)):
            last_position = (column + 1) * self.block_size - 1
            if len(sequence.values) - last_position >= self.window:
                sequence.pages[column] = DROPPED

    def _write(self, seq_id: int, update: TableUpdate | None, num_new: int) -> None:
        """Do to the model what an append means, and to the memory what a worker does with the update."""
        sequence = self.sequences[seq_id]
        copies = num_new > 0 and self._copies_last_page(sequence)
        assert (update is not None and update.copy is not None) == copies
        self.num_copies += copies
        if copies:
            sequence.pages[-1] = next(self.new_pages)
        if update is not None:
            self._obey(sequence, update)
        for _ in range(num_new):
            if len(sequence.values) % self.block_size == 0:
                sequence.pages.append(next(self.new_pages))
            self._store(sequence, next(self.new_values))

    def _obey(self, sequence: ModelSequence, update: TableUpdate) -> None:
        if update.copy is not None:
            assert update.copy == (sequence.worker_table[update.first_column], update.blocks[0])
            for offset in range(len(sequence.values) % self.block_size):
                self.memory[update.copy.dst, offset] = self.memory[update.copy.src, offset]
        sequence.worker_table[update.first_column:] = update.blocks

    def _store(self, sequence: ModelSequence, value: int) -> None:
        column, offset = divmod(len(sequence.values), self.block_size)
        self.memory[sequence.worker_table[column], offset] = value
        sequence.values.append(value)


class CacheMachine(RuleBasedStateMachine):
    """Any order of the verbs, any size of block, pool and window."""

    @initialize(num_blocks=st.integers(1, 64), block_size=st.integers(1, 5), window=st.none() | st.integers(1, 12))
    def start(self, num_blocks: int, block_size: int, window: int | None) -> None:
        self.twin = Twin(num_blocks, block_size, window)

    def pick(self, index: int) -> int:
        """The sequence that `index` means, however many there are: shrinking keeps it small."""
        return sorted(self.twin.sequences)[index % len(self.twin.sequences)]

    def has_sequences(self) -> bool:
        return len(self.twin.sequences) > 0

    def has_room(self) -> bool:
        return len(self.twin.sequences) < MAX_SEQUENCES

    @precondition(has_room)
    @rule(num_tokens=st.integers(0, 12))
    def create(self, num_tokens: int) -> None:
        self.twin.create()
        self.twin.append(max(self.twin.sequences), num_tokens)

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1), num_tokens=st.integers(0, 12))
    def append_chunk(self, index: int, num_tokens: int) -> None:
        self.twin.append(self.pick(index), num_tokens)

    @precondition(has_sequences)
    @rule()
    def append_one_to_each(self) -> None:
        self.twin.append_one_to_each()

    @precondition(lambda self: self.has_sequences() and self.has_room())
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def fork(self, index: int) -> None:
        self.twin.fork(self.pick(index))

    @precondition(lambda self: self.has_sequences() and self.has_room())
    @rule(index=st.integers(0, MAX_SEQUENCES - 1), child_writes=st.booleans())
    def fork_and_write(self, index: int, child_writes: bool) -> None:
        parent_id = self.pick(index)
        self.twin.fork(parent_id)
        self.twin.append(max(self.twin.sequences) if child_writes else parent_id, 1)

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def free(self, index: int) -> None:
        self.twin.free(self.pick(index))

    @precondition(has_sequences)
    @rule(index=st.integers(0, MAX_SEQUENCES - 1))
    def make_mistakes(self, index: int) -> None:
        self.twin.refuse_mistakes(self.pick(index))

    @invariant()
    def is_sound(self) -> None:
        self.twin.check()

    def teardown(self) -> None:
        if not hasattr(self, "twin"):
            return
        for seq_id in list(self.twin.sequences):
            self.twin.free(seq_id)
        self.twin.check()
        assert self.twin.cache.num_free_blocks == self.twin.num_blocks


# Lives end early now and then: 600 of them come to 2.6 x 10^4 steps, each of them checked.
CacheMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None, derandomize=True, print_blob=True
)
TestCacheMachine = CacheMachine.TestCase


def random_life(rng: random.Random, num_steps: int) -> None:
    """One cache from start to end: `num_steps` operations, a check after each, everything free at the end."""
    twin = Twin(rng.randint(1, 80), rng.choice((1, 2, 3, 4, 8)), rng.choice((None, rng.randint(1, 16))))
    for _ in range(num_steps):
        random_step(twin, rng)
        twin.check()
    for seq_id in list(twin.sequences):
        twin.free(seq_id)
    twin.check()
    assert twin.cache.num_free_blocks == twin.num_blocks


def random_step(twin: Twin, rng: random.Random) -> None:
    """One operation on one sequence; the weights keep pools nearly full and branches alive."""
    num_sequences = len(twin.sequences)
    if num_sequences == 0 or (num_sequences < MAX_SEQUENCES and rng.random() < 0.1):
        twin.create()
        return
    seq_id = rng.choice(list(twin.sequences))
    verb = rng.choices(("one", "each", "chunk", "fork", "free", "mistakes"), (40, 20, 12, 14, 12, 2))[0]
    if verb == "one":
        twin.append(seq_id, 1)
    elif verb == "each":
        twin.append_one_to_each()
    elif verb == "chunk":
        twin.append(seq_id, rng.randint(0, 20))
    elif verb == "fork" and num_sequences < MAX_SEQUENCES:
        twin.fork(seq_id)
    elif verb == "free":
        twin.free(seq_id)
    else:
        twin.refuse_mistakes(seq_id)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_million_random_steps_keep_every_promise() -> None:
    """`Twin.check` asserts every promise after each operation."""
    fuzz(lambda seed: random_life(random.Random(seed), STEPS_PER_RUN), 10**6)
