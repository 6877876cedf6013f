"""Device CUDA: the memory of one GPU, the swapper to pinned host memory, and the executor with two steps in flight."""

import gc
from typing import TYPE_CHECKING

import torch

from quire.core.config import batched_tokens_of_card
from quire.core.errors import ConfigError
from quire.core.host_limits import free_memory_bytes
from quire.execution.cuda.cuda_graphs import GraphSizes
from quire.execution.cuda.cuda_memory import (
    CudaSwapper,
    PinnedMemory,
    device_allocator,
    empty_host_cache,
    pinned_bytes,
    use_exact_products,
)
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker
from quire.execution.cuda.memory_profiling import CudaMemoryMeter, available_kv_bytes
from quire.execution.device import StepLimits
from quire.execution.worker import StepCompute
from quire.kernels.back_end import BackEnd
from quire.kernels.triton.card import use_early_launch
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import LanguageModel

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

SWAP_BYTES = 4 << 30  # the contract's default


def default_batched_tokens() -> int:
    """Return the tokens in one step, by default, on the current GPU."""
    return batched_tokens_of_card(torch.cuda.mem_get_info()[1], torch.cuda.get_device_name())


class CudaDevice:
    """The current GPU: a `Device`. Made before the model is loaded, since it measures the memory taken from then on.

    `utilization`: of the card's memory, for weights, steps and the KV cache. `sizes`: of graphs, which are captured at
    start if `captures_graphs`, else after some steps that need them. `launches_early`: kernels, in the whole process.
    """

    kv_share = 1.0

    def __init__(self, utilization: float, sizes: GraphSizes, *, captures_graphs: bool, launches_early: bool) -> None:
        use_exact_products()
        use_early_launch(is_on=launches_early)
        self.default_batched_tokens = default_batched_tokens()
        self.tensor_device = torch.device("cuda", torch.cuda.current_device())
        self._meter = CudaMemoryMeter(self.tensor_device)
        self._utilization, self._sizes, self._captures_graphs = utilization, sizes, captures_graphs

    def free_bytes(self) -> int:
        """Return the bytes of the card that no process holds."""
        return self._meter.free_and_total_bytes()[0]

    def kv_bytes(self, model: LanguageModel, limits: StepLimits, slots: "TritonSlots | None") -> int:
        """Return the bytes that the utilization leaves beside weights and the largest step, which is run."""
        return available_kv_bytes(model, *limits, self._utilization, self._meter, slots, self._sizes)

    def default_swap_bytes(self) -> int:
        """Return `SWAP_BYTES`, or half of the host's free memory if that is less."""
        return min(SWAP_BYTES, free_memory_bytes() // 2)

    def allocate_cache(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, back_end: BackEnd, num_slots: int = 0
    ) -> KVCache:
        """Return a cache of zeros in the card's memory."""
        assert num_slots == 0, "states are refused on a GPU"
        return KVCache.allocate(geometry, num_blocks, block_size, back_end, device_allocator(self.tensor_device))

    def swapper(
        self, cache: KVCache, geometry: KVGeometry, num_blocks: int, back_end: BackEnd, directory: str | None,
        num_slots: int = 0,
    ) -> CudaSwapper:  # fmt: skip
        """Allocate the swap space in pinned host memory. ConfigError if it is beyond the free memory."""
        sizes, free_bytes = geometry.tensor_bytes(num_blocks, cache.block_size), free_memory_bytes()
        if (swap_bytes := pinned_bytes(sizes)) > free_bytes:
            raise ConfigError(
                f"the swap space takes {swap_bytes} bytes, but only {free_bytes} are free in the host's memory; lower "
                "swap_space or num_swap_blocks"
            )
        pinned = PinnedMemory(sizes)
        space = KVCache.allocate(geometry, num_blocks, cache.block_size, back_end, pinned.allocate)
        return CudaSwapper(cache, space, back_end.copy_blocks)

    def executor(self, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        """Return an executor that takes the next step while one runs; with a drafter, one: it needs the drafts."""
        worker = CudaWorker(compute, self._sizes)
        if self._captures_graphs:
            worker.capture_graphs(max_num_batched_tokens)
        return AsyncCudaExecutor(worker, max_steps_in_flight=2 if compute.drafter is None else 1)

    def release(self) -> None:
        """Return unreferenced memory of the card, and pinned host memory, to the system.

        cuBLAS keeps its workspace, a few dozen MiB, for the life of the process: CUDA graphs may refer to it.
        """
        gc.collect()
        torch.cuda.empty_cache()
        empty_host_cache()
