"""Swapper: block copies between the cache and the swap space, one call per direction and step, with measured rates."""

import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.core.errors import ConfigError
from quire.core.plan import BlockCopy, StepPlan
from quire.execution.step_timer import Rate
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache import CopyBlocks
from quire.kernels.tensors import Tensor
from quire.model.kv_cache import ALIGNMENT, KVCache, KVGeometry

Pools = tuple[list[Tensor], list[Tensor]]  # tensors of blocks, and of slots


class Swapper:
    """The swap space's tensors, laid out as the cache's, and the rates of both directions in blocks per second."""

    def __init__(self, cache: KVCache, space: KVCache, copy_blocks: CopyBlocks) -> None:
        self._cache, self._space = cache.tensors, space.tensors
        self._states, self._swapped_states = cache.states, space.states
        self._copy_blocks = copy_blocks
        self.out_rate, self.in_rate = Rate(), Rate()

    def move(self, plan: StepPlan, slots: NDArray[np.int64]) -> float:
        """Swap out, then in; return the seconds. slots [T]: where the step's forward pass will write."""
        cache, space = (self._cache, self._states), (self._space, self._swapped_states)
        out_s = self._move(cache, space, (plan.swap_outs, plan.state_outs), self.out_rate)
        return out_s + self._move(space, cache, (plan.swap_ins, plan.state_ins), self.in_rate)

    def _move(self, sources: Pools, destinations: Pools, copies: tuple[list[BlockCopy], ...], rate: Rate) -> float:
        """Copy blocks, and slots of states: their time counts as that of the blocks."""
        if not any(copies):
            return 0.0
        started_s = time.perf_counter()
        for source, destination, own in zip(sources, destinations, copies, strict=True):
            if own:
                src, dst = np.array(own).T
                self._copy_blocks(source, destination, src, dst)
        seconds = time.perf_counter() - started_s
        rate.add(len(copies[0]), seconds)
        return seconds


def allocate_swap_space(
    geometry: KVGeometry, num_blocks: int, block_size: int, back_end: BackEnd, directory: str | None,
    num_slots: int = 0,
) -> KVCache:  # fmt: skip
    """Return tensors like the cache's for `num_blocks` blocks, and `num_slots` slots for states.

    `directory`: of the file; None is the system's directory for temporary files. Raises ConfigError if it is not
    writable or has too little room.
    """
    sizes = geometry.tensor_bytes(num_blocks, block_size) + [num_slots * each.num_bytes for each in geometry.states]
    space = UnlinkedFile(Path(directory or tempfile.gettempdir()), sum(sizes) + len(sizes) * ALIGNMENT)
    return KVCache.allocate(geometry, num_blocks, block_size, back_end, space.allocate, num_slots)


class UnlinkedFile:
    """An unlinked file as memory, allocated from its beginning. It is deleted with the last tensor in it."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._memory = np.frombuffer(_mapped_file(directory, num_bytes), np.uint8)
        self._num_used = 0

    def allocate(self, num_bytes: int) -> Array:
        """Return the next so many bytes, aligned, uint8 [num_bytes]."""
        start = self._num_used + -self._num_used % ALIGNMENT
        self._num_used = start + num_bytes
        return self._memory[start : self._num_used]


def _mapped_file(directory: Path, num_bytes: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(prefix="quire-swap-", dir=directory) as file:
            disk = os.fstatvfs(file.fileno())
            free_bytes = disk.f_bavail * disk.f_frsize
            if num_bytes <= free_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise ConfigError(f"swap_dir {str(directory)!r} cannot take a file of {num_bytes} bytes: {error}") from error
    raise ConfigError(
        f"the swap space takes {num_bytes} bytes, but only {free_bytes} are free in swap_dir {str(directory)!r}; lower "
        "swap_space or num_swap_blocks, or choose another swap_dir"
    )
