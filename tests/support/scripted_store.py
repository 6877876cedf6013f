"""A store of KV blocks in memory that answers by a script: after some turns, never, or with spoilt blocks.

It stands in for `quire.execution.kv_store.KVStore` where the cache is that of the fake executor, with digests in place
of keys and values. A block that is read is given back as it was written, or not at all.
"""

import random
from collections.abc import Sequence

from quire.core.kv_identity import NO_PARENT, NO_STATES, StateParts, StoredBlock
from quire.execution.kv_store import Finished, LoadedBlocks, Written
from support.fake_executor import FakeState

Payload = list[int] | FakeState


class ScriptedStore:
    """Slots over the slots of a fake executor. `rng` draws how long each answer takes, and what fails."""

    def __init__(
        self, num_slots: int, rng: random.Random, *,
        most_turns: int = 3, bad_rate: float = 0.0, never_rate: float = 0.0, num_staged: int = 8,
        never_postpones: bool = False,
    ) -> None:  # fmt: skip
        self.num_slots, self._rng = num_slots, rng
        self.memory, self.block_size = list[int](), 1
        self.states, self.parts = list[FakeState | None](), NO_STATES
        self._partial: dict[int, FakeState] = {}          # slots of states with their first parts
        self._most_turns, self._bad_rate, self._never_rate = most_turns, bad_rate, never_rate
        self._num_staged = num_staged                     # blocks on their way out at once
        self.disk: dict[int, tuple[StoredBlock, Payload]] = {}
        self._writing: list[tuple[int, StoredBlock, Payload]] = []   # turns left
        self._reading: dict[int, tuple[int, list[StoredBlock]]] = {}
        self._loaded: dict[int, list[Payload]] = {}
        self._dropped = set[int]()
        self.is_on, self.num_bytes = True, 0
        self.num_hung = 0
        self.hangs = False                                # every read from now on
        self.spoilt = set[int]()                          # slots with bytes that have changed
        self._postpone_rate = 0.0 if never_postpones else 0.1

    def open(
        self, memory: list[int], block_size: int, states: list[FakeState | None], parts: StateParts
    ) -> None:
        """Begin anew with what is on the disk, over the memory of an executor."""
        self.memory, self.block_size, self.states, self.parts = memory, block_size, states, parts
        self._partial.clear()
        self._writing.clear()
        self._reading.clear()
        self._loaded.clear()
        self._dropped.clear()

    def recovered(self) -> list[StoredBlock]:
        """Return the records on the disk, parents first; those without a parent last."""
        left, found = dict(self.disk), list[StoredBlock]()
        known = {NO_PARENT}
        while ready := [slot for slot, (block, _) in left.items() if block.parent in known]:
            found += [left.pop(slot)[0] for slot in ready]
            known.update(ready)
        return found + [block for block, _ in left.values()]

    def scope_key(self, scope: bytes) -> bytes:
        return scope.ljust(32, b".")[:32]

    def begin_write(self, block: StoredBlock, source: int) -> bool:
        if len(self._writing) >= self._num_staged:
            return False
        assert block.slot not in self.disk, f"slot {block.slot} is written over a block that was not forgotten"
        payload: Payload = self.memory[source * self.block_size : (source + 1) * self.block_size]
        if (number := source - self.parts.num_blocks) >= 0 and self.parts.num_parts:
            state = self.states[number // self.parts.num_parts]
            assert state is not None, "a part of a state that was never written"
            assert not state.ring, "a part of no snapshot"
            payload = state
        self._writing.append((self._rng.randint(0, self._most_turns), block, payload))
        return True

    def begin_read(self, job: int, blocks: Sequence[StoredBlock]) -> bool:
        if self._rng.random() < self._postpone_rate:
            return False
        is_hung = self.hangs or self._rng.random() < self._never_rate
        self.num_hung += is_hung
        self._reading[job] = (1 << 30 if is_hung else self._rng.randint(0, self._most_turns)), list(blocks)
        return True

    def finished(self) -> list[Finished]:
        ended: list[Finished] = []
        for turns, block, payload in self._writing:
            if turns == 0:
                is_whole = self._rng.random() >= self._bad_rate
                if is_whole:
                    self.disk[block.slot] = block, payload
                ended.append(Written(block.slot, is_whole, 1, 0.0))
        self._writing = [(turns - 1, *rest) for turns, *rest in self._writing if turns]  # type: ignore[misc]
        for job, (turns, blocks) in list(self._reading.items()):
            if turns:
                self._reading[job] = turns - 1, blocks
                break                                     # reads end in the order in which they were begun
            del self._reading[job]
            good = self._read(blocks)
            if job not in self._dropped:
                self._loaded[job] = good
            self._dropped.discard(job)
            ended.append(LoadedBlocks(job, len(good), 1, 0.0))
        return ended

    def _read(self, blocks: list[StoredBlock]) -> list[Payload]:
        good = list[Payload]()
        for block in blocks:
            record = self.disk.get(block.slot)
            if record is None or record[0] != block or block.slot in self.spoilt or self._rng.random() < self._bad_rate:
                break
            good.append(record[1])
        return good

    def take_into(self, job: int, destinations: Sequence[int]) -> None:
        for payload, block in zip(self._loaded.pop(job), destinations, strict=False):
            if isinstance(payload, FakeState):
                self._put_part(payload, block - self.parts.num_blocks)
            else:
                self.memory[block * self.block_size : (block + 1) * self.block_size] = payload

    def _put_part(self, state: FakeState, number: int) -> None:
        slot, part = divmod(number, self.parts.num_parts)
        if part == 0:
            self._partial[slot], self.states[slot] = state, None
        assert self._partial[slot] == state, "parts of two states"
        if part == self.parts.num_parts - 1:
            self.states[slot] = self._partial.pop(slot)

    def drop(self, job: int) -> None:
        if self._loaded.pop(job, None) is None:
            self._dropped.add(job)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.disk.pop(slot, None)
            self._writing = [each for each in self._writing if each[1].slot != slot]

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._reading.clear()
