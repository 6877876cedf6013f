"""Sizes of an engine by the free memory of its device: arithmetic in `sizing`, measurements in `memory_profiling`."""

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.engine.sizing import (
    CPU_KV_CACHE_SHARE,
    CUDA_SWAP_BYTES,
    ModelLimits,
    free_memory_bytes,
    size_engine,
    table_positions,
)
from quire.execution.device_memory import pinned_bytes
from quire.execution.memory_profiling import CudaMemoryMeter, available_kv_bytes
from quire.kernels.low_rank import AdapterSlots
from quire.model.kv_geometry import KVGeometry
from quire.model.language_model import LanguageModel


def positions_for(options: EngineOptions, limits: ModelLimits, meter: CudaMemoryMeter | None) -> int:
    """Return the number of positions of the model's tables, by the memory that is free before it is loaded."""
    if meter is None:
        return table_positions(options, limits, free_memory_bytes(), CPU_KV_CACHE_SHARE)
    return table_positions(options, limits, meter.free_and_total_bytes()[0], share=1.0)


def configs_for(
    options: EngineOptions, limits: ModelLimits, model: LanguageModel, meter: CudaMemoryMeter | None,
    most_bytes: int | None = None, slots: AdapterSlots | None = None,
) -> tuple[CacheConfig, SchedulerConfig]:  # fmt: skip
    """Return the cache and scheduler configuration by the memory of the model's device, adapters' slots included.

    `most_bytes`: free on the machine of another rank that has the least; all ranks have as many blocks.
    """
    if meter is None:
        free_bytes = free_memory_bytes()
        return size_engine(options, limits, free_bytes if most_bytes is None else min(free_bytes, most_bytes))
    left = available_kv_bytes(
        model,
        options.resolved_max_num_seqs,
        options.resolved_max_num_batched_tokens,
        limits.max_position_embeddings,
        options.block_size,
        options.gpu_memory_utilization,
        meter,
        slots,
    )
    free_bytes = free_memory_bytes()
    swap_bytes = min(CUDA_SWAP_BYTES, free_bytes // 2) if options.memory_policy == "paged" else 0
    cache, scheduler = size_engine(options, limits, left, share=1.0, default_swap_bytes=swap_bytes)
    _check_swap_space(cache, model.kv_geometry, free_bytes)
    return cache, scheduler


def _check_swap_space(cache: CacheConfig, geometry: KVGeometry, free_bytes: int) -> None:
    """Raise ConfigError if the host's memory cannot hold the swap space of a GPU."""
    swap_bytes = pinned_bytes(geometry.tensor_bytes(cache.num_swap_blocks * cache.block_size))
    if swap_bytes > free_bytes:
        raise ConfigError(
            f"the swap space takes {swap_bytes} bytes, but only {free_bytes} are free in the host's memory; lower "
            "swap_space or num_swap_blocks"
        )
