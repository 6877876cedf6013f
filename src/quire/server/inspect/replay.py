"""Playground of the KV cache: a list of operations replayed on a small cache of its own.

The page keeps the list; nothing is kept here. Blocks are managed by the engine's own code. As in the engine, an
operation that finds too few free blocks changes nothing.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.manager import KVCacheManager
from quire.core.block_map import BlockEntry
from quire.core.config import CacheConfig
from quire.core.errors import InvalidRequestError
from quire.core.outputs import KVStats

NUM_BLOCKS, BLOCK_SIZE = 64, 16
MAX_OPERATIONS = 256
MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE  # bound of one append

Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_OPERATIONS)]  # number of a sequence


class _Operation(msgspec.Struct, tag_field="op", tag=str.lower, frozen=True, forbid_unknown_fields=True):
    """Base of the operations: `op` is the class name in lower case."""


class New(_Operation, frozen=True):
    """Create an empty sequence. Sequences are numbered from 0; no number is used twice."""


class Append(_Operation, frozen=True):
    """Append tokens to a sequence."""

    sequence: Number
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class Fork(_Operation, frozen=True):
    """Fork a sequence: the child shares all of its blocks."""

    sequence: Number


class Write(_Operation, frozen=True):
    """Append one token to a sequence: into its last block, if that has room."""

    sequence: Number


class Free(_Operation, frozen=True):
    """Free a sequence."""

    sequence: Number


Operation = New | Append | Fork | Write | Free


class ReplayedSequence(NamedTuple):
    """A sequence that has not been freed: its number of tokens and its block table."""

    sequence: int
    num_tokens: int
    table: list[int]


class Replay(msgspec.Struct, frozen=True):
    """State after the last operation, and the outcome of each in words."""

    stats: KVStats
    blocks: list[BlockEntry]
    sequences: list[ReplayedSequence]
    outcomes: list[str]


def replay(operations: Sequence[Operation]) -> Replay:
    """Run operations on an empty cache of 64 blocks of 16. InvalidRequestError for an invalid one."""
    if len(operations) > MAX_OPERATIONS:
        raise InvalidRequestError(
            f"operations must be at most {MAX_OPERATIONS}, got {len(operations)}", param="operations"
        )
    cache_replay = _ReplayCache()
    outcomes = [cache_replay.run(operation, f"operations[{index}]") for index, operation in enumerate(operations)]
    cache = cache_replay.cache
    sequences = [
        ReplayedSequence(seq_id, cache.num_tokens(seq_id), cache.block_ids(seq_id)) for seq_id in cache_replay.alive
    ]
    return Replay(cache.stats(), cache.view_blocks(0, NUM_BLOCKS), sequences, outcomes)


class _ReplayCache:
    """A cache and the sequences in it."""

    def __init__(self) -> None:
        self.cache = KVCacheManager(CacheConfig(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False))
        self.alive: dict[int, None] = {}        # ids, oldest first
        self._num_created = 0

    def run(self, operation: Operation, param: str) -> str:
        """Run one operation and return its outcome in words."""
        if not isinstance(operation, New) and operation.sequence not in self.alive:
            message = f"{param}: there is no sequence {operation.sequence}, only {list(self.alive)}"
            raise InvalidRequestError(message, param=param)
        match operation:
            case New():
                self.cache.create(self._create_sequence())
                return "an empty sequence: it holds no block"
            case Append(sequence, count):
                return self._append(sequence, count)
            case Write(sequence):
                return self._append(sequence, 1)
            case Fork(sequence):
                self.cache.fork(sequence, self._create_sequence())
                return f"shares all {len(self.cache.block_ids(sequence))} blocks; none is taken, none is copied"
            case Free(sequence):
                del self.alive[sequence]
                return self._free(sequence)

    def _create_sequence(self) -> int:
        seq_id = self._num_created
        self._num_created += 1
        self.alive[seq_id] = None
        return seq_id

    def _append(self, sequence: int, count: int) -> str:
        try:
            update = self.cache.append(sequence, count)
        except OutOfBlocksError as error:
            return f"refused: {error}; nothing has changed"
        if update is None:
            return "written in place: the last block had room and has one owner"
        if update.copy is None:
            return f"took {_blocks(update.blocks)}"
        source, copy = update.copy
        taken = f", and took {_blocks(update.blocks[1:])}" if update.blocks[1:] else ""
        return f"block {source} was shared: copied to {copy} before the write{taken}"

    def _free(self, sequence: int) -> str:
        num_held, num_free = len(self.cache.block_ids(sequence)), self.cache.num_free_blocks
        self.cache.free(sequence)
        return f"let go of {num_held} blocks; {self.cache.num_free_blocks - num_free} of them are free now"


def _blocks(blocks: Sequence[int]) -> str:
    return f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {', '.join(map(str, blocks))}"
