"""The tree of stored blocks: by examples, and by random operations against a plain model."""

import random

import pytest

from quire.cache.prefix_tree import as_bytes
from quire.cache.stored_blocks import StoredBlocks
from quire.core.kv_identity import StoredBlock
from support.fuzz_seeds import STEPS_PER_RUN, fuzz

SIZE = 2
A, B = b"a" * 32, b"b" * 32


def run_of(*tokens: int) -> bytes:
    return as_bytes(tokens)


def write(stored: StoredBlocks, scope: bytes, packed: bytes) -> list[int]:
    """Write all that is missing of a run; return its slots as far as there was room."""
    path = stored.path(scope, packed)
    stored.touch(path)
    while len(path) < len(packed) // (4 * SIZE):
        slot = stored.add(path, scope, packed)
        if slot is None:
            break
        stored.end_write(slot, is_ok=True)
    stored.touch(path)
    stored.check()
    return path


def test_run_is_found_as_far_as_it_is_written_in_its_scope_alone() -> None:
    stored = StoredBlocks(8, SIZE)
    path = write(stored, A, run_of(1, 2, 3, 4))
    assert stored.find(A, run_of(1, 2, 3, 4, 5, 6)) == path
    assert stored.find(A, run_of(1, 2, 9, 4)) == path[:1]
    assert stored.find(A, run_of(1)) == []
    assert stored.find(B, run_of(1, 2, 3, 4)) == []


def test_block_is_found_when_its_bytes_are_written() -> None:
    stored = StoredBlocks(8, SIZE)
    path = list[int]()
    slot = stored.add(path, A, run_of(1, 2))
    assert slot is not None
    assert stored.find(A, run_of(1, 2)) == []
    assert stored.path(A, run_of(1, 2)) == [slot]
    stored.end_write(slot, is_ok=True)
    assert stored.find(A, run_of(1, 2)) == [slot]
    stored.check()


def test_failed_write_removes_what_is_below_it() -> None:
    stored = StoredBlocks(2, SIZE)
    path, packed = list[int](), run_of(1, 2, 3, 4)
    first, second = stored.add(path, A, packed), stored.add(path, A, packed)
    assert first is not None
    assert second is not None
    stored.end_write(first, is_ok=False)
    assert stored.path(A, packed) == []
    assert stored.add([], A, packed) == first, "the slot of the other is still being written"
    stored.check()
    stored.end_write(second, is_ok=True)
    assert stored.path(A, packed) == [first], "a write that ends after its removal brings nothing back"
    stored.check()


def test_least_recently_used_leaf_is_evicted_and_its_slot_forgotten_first() -> None:
    stored = StoredBlocks(4, SIZE)
    old, new = write(stored, A, run_of(1, 2, 3, 4)), write(stored, A, run_of(5, 6, 7, 8))
    stored.touch(old)
    third = write(stored, A, run_of(9, 9))
    assert third == [new[1]], "a leaf goes before its parent"
    assert stored.take_forgotten() == [new[1]]
    assert stored.take_forgotten() == []
    assert stored.find(A, run_of(5, 6, 7, 8)) == new[:1]
    assert stored.find(A, run_of(1, 2, 3, 4)) == old


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_run_longer_than_the_store_keeps_its_beginning(num_slots: int) -> None:
    stored = StoredBlocks(num_slots, SIZE)
    packed = run_of(*range(10))
    path = write(stored, A, packed)
    assert len(path) == num_slots
    assert stored.find(A, packed) == path


def test_held_slot_is_neither_evicted_nor_given_out_after_its_removal() -> None:
    stored = StoredBlocks(1, SIZE)
    (slot,) = write(stored, A, run_of(1, 2))
    stored.hold([slot])
    assert stored.add([], A, run_of(3, 4)) is None
    stored.remove(slot)
    assert slot not in stored
    assert stored.add([], A, run_of(3, 4)) is None
    stored.release([slot])
    assert stored.add([], A, run_of(3, 4)) == slot
    stored.check()


def test_store_without_slots_stores_nothing() -> None:
    stored = StoredBlocks(0, SIZE)
    assert stored.add([], A, run_of(1, 2)) is None
    assert stored.find(A, run_of(1, 2)) == []
    stored.check()


def test_recovered_records_are_the_tree_that_was_written() -> None:
    old = StoredBlocks(8, SIZE)
    runs = [(A, run_of(1, 2, 3, 4)), (B, run_of(1, 2)), (A, run_of(1, 2, 5, 6))]
    records = dict[int, StoredBlock]()
    for scope, packed in runs:
        path = write(old, scope, packed)
        for index, slot in enumerate(path):
            records.setdefault(slot, old.record(path, index, scope, packed))
    new = StoredBlocks(8, SIZE)
    new.recover(records.values())
    new.check()
    for scope, packed in runs:
        assert new.find(scope, packed) == old.find(scope, packed)
    assert new.forgotten == []
    assert len(new) == len(old) == 4


@pytest.mark.parametrize("record", [
    StoredBlock(9, -1, run_of(1, 2), A), StoredBlock(-1, -1, run_of(1, 2), A), StoredBlock(1, 7, run_of(1, 2), A),
    StoredBlock(1, 0, run_of(1, 2), B), StoredBlock(1, -1, run_of(1, 2, 3), A), StoredBlock(1, -1, run_of(1, 2), b"a"),
    StoredBlock(0, -1, run_of(7, 7), A), StoredBlock(1, -1, run_of(8, 8), A),
])  # fmt: skip
def test_record_that_does_not_fit_is_forgotten(record: StoredBlock) -> None:
    stored = StoredBlocks(4, SIZE)
    stored.recover([StoredBlock(0, -1, run_of(8, 8), A), record])
    stored.check()
    assert len(stored) == 1
    assert stored.find(A, run_of(8, 8)) == [0]
    assert stored.forgotten == ([record.slot] if record.slot == 1 else [])


class Model:
    """What a tree of stored blocks must be, by the plainest means: whole runs of tokens by scope, and their slots."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_slots = rng.choice([1, 2, 3, 5, 9, 20])
        self.stored = StoredBlocks(self.num_slots, SIZE)
        self.slots: dict[tuple[bytes, bytes], int] = {}   # scope, whole run -> slot
        self.writing: dict[int, tuple[bytes, bytes]] = {}
        self.orphans: set[int] = set()                    # slots of removed blocks that are still being written
        self.reads: list[list[int]] = []
        self.used: list[tuple[bytes, bytes]] = []         # runs, the least recently used first

    def draw(self) -> tuple[bytes, bytes]:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(9))]
        return self.rng.choice([A, B]), as_bytes(tokens)

    def blocks_of(self, scope: bytes, packed: bytes) -> list[tuple[bytes, bytes]]:
        step = 4 * SIZE
        return [(scope, packed[:end]) for end in range(step, len(packed) + 1, step)]

    def expected_path(self, scope: bytes, packed: bytes) -> list[int]:
        path = []
        for run in self.blocks_of(scope, packed):
            if run not in self.slots:
                break
            path.append(self.slots[run])
        return path

    def use(self, scope: bytes, packed: bytes) -> None:
        runs = [run for run in self.blocks_of(scope, packed) if run in self.slots]
        self.used = [run for run in self.used if run not in runs] + runs[::-1]

    def drop(self, run: tuple[bytes, bytes]) -> None:
        gone = [each for each in self.slots if each[0] == run[0] and each[1].startswith(run[1])]
        for each in gone:
            slot = self.slots.pop(each)
            self.used.remove(each)
            if slot in self.writing:
                del self.writing[slot]
                self.orphans.add(slot)

    def is_held(self, slot: int) -> bool:
        return slot in self.writing or slot in self.orphans or any(slot in read for read in self.reads)

    def victim(self) -> tuple[bytes, bytes] | None:
        return self.used[0] if self.used else None

    def write(self) -> None:
        scope, packed = self.draw()
        path = self.stored.path(scope, packed)
        assert path == self.expected_path(scope, packed)
        self.stored.touch(path)
        self.use(scope, packed)
        missing = self.blocks_of(scope, packed)[len(path) :]
        for run in missing[: self.rng.randint(1, 4)]:
            before = {slot for slot in range(self.num_slots) if slot in self.stored}
            slot = self.stored.add(path, scope, packed)
            free = [each for each in range(self.num_slots) if each not in before and not self.is_held(each)]
            victim = self.victim()
            if slot is None:
                assert not free, f"slots {free} are free"
                assert victim is None or self.is_held(self.slots[victim]) or packed.startswith(victim[1])
                break
            if not free:
                assert victim is not None
                assert slot == self.slots[victim]
                assert not self.is_held(slot)
                self.drop(victim)
                assert self.stored.take_forgotten() == [slot]
            assert slot not in self.slots.values()
            self.slots[run], self.writing[slot] = slot, run
            self.used.append(run)
        self.stored.touch(path)
        self.use(scope, packed)

    def end_write(self) -> None:
        if slots := [*self.writing, *self.orphans]:
            slot, is_ok = self.rng.choice(slots), self.rng.random() < 0.8
            self.stored.end_write(slot, is_ok=is_ok)
            self.orphans.discard(slot)
            run = self.writing.pop(slot, None)
            if run is not None and not is_ok:
                self.drop(run)
                assert slot in self.stored.take_forgotten()

    def read(self) -> None:
        scope, packed = self.draw()
        found, path = self.stored.find(scope, packed), self.expected_path(scope, packed)
        num_written = next((i for i, slot in enumerate(path) if slot in self.writing), len(path))
        assert found == path[:num_written]
        self.stored.hold(found)
        self.stored.touch(found)
        self.use(scope, packed[: 4 * SIZE * len(found)])
        self.reads.append(found)

    def end_read(self) -> None:
        if self.reads:
            read = self.reads.pop(self.rng.randrange(len(self.reads)))
            self.stored.release(read)

    def remove(self) -> None:
        if self.slots and self.rng.random() < 0.3:
            run = self.rng.choice(list(self.slots))
            self.stored.remove(self.slots[run])
            self.drop(run)
            assert self.stored.take_forgotten()


def random_life(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(rng)
    for _ in range(STEPS_PER_RUN):
        rng.choice([model.write, model.write, model.end_write, model.end_write, model.read, model.end_read,
                    model.remove])()  # fmt: skip
        model.stored.check()
        assert len(model.stored) == len(model.slots)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_agree_with_a_plain_model(seed: int) -> None:
    random_life(seed)


@pytest.mark.fuzz
def test_many_random_operations_agree_with_a_plain_model() -> None:
    fuzz(random_life, 100_000)
