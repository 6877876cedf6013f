"""Memory of a GPU and pinned memory of its host, for caches, and the swapper between them."""

from collections import deque
from collections.abc import Callable, Sequence, Set

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import BlockCopy, StepPlan
from quire.execution.step_timer import Rate
from quire.execution.swapper import Swapper
from quire.kernels.kv_cache import CopyBlocks
from quire.model.kv_cache import ALIGNMENT, KVCache

SWAP_OUT_CHUNK = 64  # blocks; a write to one of them waits for all: 2 ms for those of a model of 8 billion parameters


def device_allocator(device: torch.device) -> Callable[[int], Tensor]:
    """Return an allocator of zeros on a device, uint8 [num_bytes]."""
    return lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class PinnedMemory:
    """Zeros in pinned host memory, which a GPU reads and writes itself, for tensors of given sizes in bytes.

    PyTorch rounds each pinned allocation up to a power of two: up to twice the memory, tensor by tensor. So as many
    tensors as fill a power of two share an allocation (a slab), and what is left unused is less than a tensor of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._slab_sizes = deque(_slab_sizes(sizes))
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of the next tensor, uint8 [num_bytes]; tensors come in the order of the sizes."""
        padded_bytes = _padded(num_bytes)
        if len(self._slab) < padded_bytes:
            self._slab = torch.zeros(self._slab_sizes.popleft(), dtype=torch.uint8, pin_memory=True)
        allocated, self._slab = self._slab[:num_bytes], self._slab[padded_bytes:]
        return allocated


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that `PinnedMemory` allocates for tensors of these sizes, PyTorch's rounding included."""
    return sum(1 << (slab_bytes - 1).bit_length() for slab_bytes in _slab_sizes(sizes) if slab_bytes)


def _slab_sizes(sizes: Sequence[int]) -> list[int]:
    """Cut tensors, in order, into slabs: each is filled up to the largest power of two below all that remains."""
    padded = deque(map(_padded, sizes))
    remaining_bytes, slabs = sum(padded), list[int]()
    while padded:
        limit, slab_bytes = 1 << max(0, remaining_bytes.bit_length() - 1), padded.popleft()
        while padded and slab_bytes + padded[0] <= limit:
            slab_bytes += padded.popleft()
        remaining_bytes -= slab_bytes
        slabs.append(slab_bytes)
    return slabs


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def empty_host_cache() -> None:
    """Give the pinned memory that PyTorch keeps for reuse back to the system."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
        return
    torch._C._host_emptyCache()  # torch 2.11 has no public name for it


def use_exact_products() -> None:
    """Let a GPU multiply float32 as float32 and sum 16-bit products in float32, whatever the environment has set.

    NVIDIA's images allow TF32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and PyTorch by default sums parts of a split 16-bit
    product in 16 bits: both are beyond the errors that `docs/gpu.md` states.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class CudaSwapper(Swapper):
    """A swapper on a CUDA stream of its own, concurrent with the forward pass; events order accesses to a block.

    A step's swaps begin after all kernels launched before. The step's forward pass waits for the blocks that are
    swapped in, and for pending swap-outs of blocks that it overwrites or that are swapped in again at once; the other
    swap-outs run concurrently. Their duration is known at one of the next calls.
    """

    def __init__(self, cache: KVCache, space: KVCache, copy_blocks: CopyBlocks) -> None:
        super().__init__(cache, space, copy_blocks)
        self._block_size = cache.block_size
        self._stream = torch.cuda.Stream(cache.keys[0].device)  # type: ignore[no-untyped-call]
        self._pending_outs = deque[tuple[Set[int], torch.cuda.Event]]()  # blocks, end of their copy; in launch order
        self._pending_timings = deque[tuple[int, Rate, torch.cuda.Event, torch.cuda.Event]]()

    def __del__(self) -> None:
        """Wait for pending copies: the memory that they read and write is freed next."""
        self._stream.synchronize()

    def move(self, plan: StepPlan, slots: NDArray[np.int64]) -> float:
        """Swap out, then in; return the seconds of those swaps that have ended since the last call."""
        while self._pending_outs and self._pending_outs[0][1].query():  # type: ignore[no-untyped-call]
            self._pending_outs.popleft()
        if plan.swap_outs or plan.swap_ins or self._pending_outs:
            self._order(plan, set((slots // self._block_size).tolist()))
        seconds = 0.0
        while self._pending_timings and self._pending_timings[0][3].query():  # type: ignore[no-untyped-call]
            count, rate, begin, end = self._pending_timings.popleft()
            rate.add(count, begin.elapsed_time(end) / 1000)
            seconds += begin.elapsed_time(end) / 1000
        return seconds

    def _order(self, plan: StepPlan, written: set[int]) -> None:
        """Start the plan's swaps, and order them with the computing stream, which writes the blocks `written`."""
        computing = torch.cuda.current_stream(self._stream.device)
        written |= {copy.dst for copy in plan.swap_ins + plan.copies}
        overlapping = (i for i, (blocks, _) in enumerate(self._pending_outs) if not written.isdisjoint(blocks))
        last = max(overlapping, default=-1)
        for _ in range(last + 1):  # copies complete in launch order
            _, is_out = self._pending_outs.popleft()
            computing.wait_event(is_out)
        if not plan.swap_outs and not plan.swap_ins:
            return
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            returning = {copy.src for copy in plan.swap_ins}  # blocks that this plan swaps out among them
            urgent, deferred = list[BlockCopy](), list[BlockCopy]()
            for copy in plan.swap_outs:
                (urgent if copy.src in written or copy.dst in returning else deferred).append(copy)
            if urgent:
                computing.wait_event(self._start(self._cache, self._space, urgent, self.out_rate))
            if plan.swap_ins:
                computing.wait_event(self._start(self._space, self._cache, plan.swap_ins, self.in_rate))
            for begin in range(0, len(deferred), SWAP_OUT_CHUNK):
                some = deferred[begin : begin + SWAP_OUT_CHUNK]
                is_out = self._start(self._cache, self._space, some, self.out_rate)
                self._pending_outs.append(({copy.src for copy in some}, is_out))

    def _start(
        self, sources: list[Tensor], destinations: list[Tensor], copies: list[BlockCopy], rate: Rate
    ) -> torch.cuda.Event:
        """Copy on the current stream; return the event of its end."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self._copy_blocks(sources, destinations, *np.array(copies).T)
        end.record()
        self._pending_timings.append((len(copies), rate, begin, end))
        return end
