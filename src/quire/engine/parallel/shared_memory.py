"""Shared memory of the ranks of one machine: regions for exchanges of activations, and the logits of rank 0.

It is an anonymous file (memfd), so nothing is left behind and no limit of /dev/shm applies; pages take memory once they
have been written.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from quire.core.arrays import FLOAT32, Array, DType
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank_messages import MemoryLayout, Report
from quire.extension import _kernels
from quire.kernels.cpp.cpp_gather import HEADER_BYTES, CppGather, CppSum, JoinedHead
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.layers import Linear
from quire.model.sharding import Cut, Shard


def logits_at(layout: MemoryLayout) -> int:
    """Return the bytes before the logits."""
    return HEADER_BYTES + 2 * layout.region_bytes


def num_bytes(layout: MemoryLayout) -> int:
    """Return the bytes of the whole memory: up to the logits, and float32 logits."""
    return logits_at(layout) + 4 * layout.max_rows * layout.vocab_size


def create_memory(layout: MemoryLayout) -> int:
    """Return the descriptor of new memory, all zeros."""
    descriptor = os.memfd_create("quire-ranks")
    os.ftruncate(descriptor, num_bytes(layout))
    return descriptor


class SharedRanks:
    """A `RankExchange` of one machine. `descriptor`: of the memory, which is mapped here and may be closed then."""

    def __init__(self, shard: Shard, layout: MemoryLayout, descriptor: int) -> None:
        self.shard = shard
        self._memory = np.frombuffer(mmap.mmap(descriptor, num_bytes(layout)), np.uint8)
        rows = self._memory[logits_at(layout) :].view(FLOAT32)
        self._logits = rows.reshape(layout.max_rows, layout.vocab_size)
        address = _kernels.address(self._memory)
        self.group = _kernels.RankGroup(address, shard.rank, shard.num_ranks, layout.region_bytes)

    def gather(self, cut: Cut) -> CppGather:
        """Return the exchange of an activation that is divided like this."""
        return CppGather(self.group, self.shard.rank, cut.bounds)

    def sum(self, width: int) -> CppSum:
        """Return the exchange of partial sums of an activation of this width."""
        return CppSum(self.group, width)

    def joined_head(self, head: Linear, cut: Cut) -> JoinedHead:
        """Return the head of all ranks from this one's."""
        assert isinstance(head, CppLinear)
        is_first = self.shard.rank == 0
        return JoinedHead(head, self.group, self._logits, cut.of(self.shard.rank), is_first=is_first)

    def broadcast(self, rows: Array | None, shape: Sequence[int], dtype: DType) -> Array:
        """Return rows [num_rows, width] of rank 0, which passes them, on every rank; others know shape and dtype."""
        num_rows, width = shape
        gather = self.gather(Cut((0, *[width] * self.shard.num_ranks)))
        return gather(np.empty((num_rows, 0), dtype) if rows is None else rows)

    def interrupt(self) -> None:
        """Give up all exchanges."""
        self.group.interrupt()

    def leave(self) -> None:
        """Give up all exchanges."""
        self.group.interrupt()

    def resume(self) -> None:
        """Let exchanges begin again."""
        self.group.resume()

    def reset(self) -> None:
        """Begin again."""
        self.group.reset()

    def close(self) -> None:
        """Do nothing: the memory is freed with its last tensor."""


class SharedMemory:
    """A `Transport` of one machine, for ranks on its CPUs."""

    def __init__(self) -> None:
        self._layout, self._descriptor = MemoryLayout(0, 0, 0), -1

    @contextmanager
    def inherited(self, layout: MemoryLayout) -> Iterator[Sequence[int]]:
        """Return the descriptor of new memory."""
        self._layout, self._descriptor = layout, create_memory(layout)
        try:
            yield [self._descriptor]
        finally:
            os.close(self._descriptor)

    def open(self, shard: Shard, peers: Sequence[Peer]) -> SharedRanks:
        """Map the memory, which `inherited` still has open."""
        return SharedRanks(shard, self._layout, self._descriptor)

    def place_of(self, peer: Peer) -> str:
        """Return nothing: the rank has inherited the memory."""
        return ""

    def handles(self, peer: Peer, report: Report) -> bool:
        """Return False: there is no such report."""
        return False
