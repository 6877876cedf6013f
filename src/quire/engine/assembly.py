"""Puts an engine together from options: device, model, memory, scheduler, executor."""

import gc
import importlib.util
import os
import shutil
from dataclasses import dataclass, replace

import torch

from quire.cache.baselines.contiguous import make_manager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.engine.engine import Engine
from quire.engine.input_processor import InputProcessor
from quire.engine.messages import Ready
from quire.engine.options import EngineOptions
from quire.engine.sizing import (
    CPU_KV_CACHE_SHARE,
    CUDA_SWAP_BYTES,
    ModelLimits,
    free_memory_bytes,
    size_engine,
    table_positions,
)
from quire.execution.async_cuda_executor import AsyncCudaExecutor
from quire.execution.batch import PersistentBatch
from quire.execution.cuda_worker import CudaWorker
from quire.execution.device_memory import device_allocator, empty_host_cache, pinned_bytes, use_exact_products
from quire.execution.executor import Executor, LocalExecutor
from quire.execution.memory_profiling import CudaMemoryMeter, available_kv_bytes
from quire.execution.swap_storage import allocate_swap_space
from quire.execution.swapper import CudaSwapper, Swapper
from quire.execution.worker import Worker
from quire.kernels.back_end import choose_back_end
from quire.kernels.cache_layout import dtype_name as torch_dtype_name
from quire.model.config import dtype_name, eos_token_ids, read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.kv_geometry import KVGeometry
from quire.model.loader import load_model
from quire.model.resolve import resolve_model
from quire.model.spec import DecoderSpec
from quire.scheduling.baselines.static_batching import make_scheduler
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine that is ready to step, and what stands around it."""

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    model: Decoder
    ready: Ready


def assemble(options: EngineOptions, *, loads_tokenizer: bool) -> AssembledEngine:
    """Load the model, size the cache, and return an engine. ModelError and ConfigError say what cannot work.

    One that takes no text, since another process tokenizes for it, does not load the tokenizer.
    """
    folder = resolve_model(options.model)
    config = read_config(folder)
    tokenizer = Tokenizer.from_folder_if_any(folder) if loads_tokenizer else None
    source = str(folder / CONFIG_FILE)
    spec = spec_from_config(config, source)
    device = resolve_device(options.device)
    back_end = choose_back_end(device, isa=options.cpu_isa, head_dim=spec.head_dim)
    meter = _cuda_memory_meter(device) if device.type == "cuda" else None
    dtype = getattr(torch, dtype_name(options.dtype, config, source))
    geometry = KVGeometry.of(spec, torch_dtype_name(back_end.cache_layout.stored_dtype(dtype)))
    limits = _limits(spec, geometry)
    num_positions = _table_positions(options, limits, meter)
    model = load_model(
        folder, dtype=options.dtype, device=device, back_end=back_end, max_positions=options.max_model_len,
        table_positions=num_positions,
    )  # fmt: skip
    limits = replace(limits, max_position_embeddings=num_positions, default_positions=None)
    cache_config, scheduler_config = _sizes(options, limits, model, meter)
    batch = PersistentBatch(
        scheduler_config.max_num_seqs, scheduler_config.max_model_len, cache_config.block_size, spec.vocab_size
    )
    cache = KVCache.allocate(
        model.kv_geometry, cache_config.num_blocks, cache_config.block_size, back_end, device_allocator(device)
    )
    swapper = None if cache_config.num_swap_blocks == 0 else _swapper(options, cache_config, model, cache)
    executor = _executor(model, cache, batch, swapper)
    scheduler = make_scheduler(scheduler_config, make_manager(cache_config))
    ready = Ready(
        limits=scheduler.limits,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids(folder, config, spec.vocab_size),
        dtype=torch_dtype_name(model.dtype),
        device=str(model.device),
        num_parameters=model.num_parameters,
        weights_bytes=model.weight_bytes,
        kv_bytes_per_token=limits.kv_bytes_per_token,
        num_swap_blocks=cache_config.num_swap_blocks,
    )
    engine = Engine(scheduler, executor)
    if tokenizer is not None:
        engine.token_bytes = tokenizer.pack_token_bytes
    return AssembledEngine(engine, InputProcessor(tokenizer, ready, options), tokenizer, model, ready)


def _limits(spec: DecoderSpec, geometry: KVGeometry) -> ModelLimits:
    """Return what sizing needs to know of a model; `geometry` is that of all models that share the block tables."""
    table_bytes = 0 if spec.rotary is None else spec.head_dim * torch.float32.itemsize
    return ModelLimits(
        spec.max_position_embeddings,
        geometry.bytes_per_token,
        geometry.sliding_window,
        table_bytes,
        spec.default_positions,
    )


def _table_positions(options: EngineOptions, limits: ModelLimits, meter: CudaMemoryMeter | None) -> int:
    """Return for how many positions the model makes tables, of the memory that is free before it is loaded."""
    if meter is None:
        return table_positions(options, limits, free_memory_bytes(), CPU_KV_CACHE_SHARE)
    return table_positions(options, limits, meter.free_and_total_bytes()[0], share=1.0)


def _sizes(
    options: EngineOptions, limits: ModelLimits, model: Decoder, meter: CudaMemoryMeter | None
) -> tuple[CacheConfig, SchedulerConfig]:
    """Return the configurations for the memory that there is, on the model's device."""
    if meter is None:
        return size_engine(options, limits, free_memory_bytes())
    left = available_kv_bytes(
        model,
        options.resolved_max_num_seqs,
        options.resolved_max_num_batched_tokens,
        limits.max_position_embeddings,
        options.block_size,
        options.gpu_memory_utilization,
        meter,
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


def _cuda_memory_meter(device: torch.device) -> CudaMemoryMeter:
    """Prepare a GPU for a model that is about to be loaded; return the meter of the memory that it takes."""
    use_exact_products()
    return CudaMemoryMeter(device)


def _executor(model: Decoder, cache: KVCache, batch: PersistentBatch, swapper: Swapper | None) -> Executor:
    """Return the executor for the model's device: on a GPU one that takes the next step while one runs."""
    if model.device.type == "cuda":
        return AsyncCudaExecutor(CudaWorker(model, cache, batch, swapper))
    return LocalExecutor(Worker(model, cache, batch, swapper))


def _swapper(options: EngineOptions, config: CacheConfig, model: Decoder, cache: KVCache) -> Swapper:
    sizes = config.num_swap_blocks, config.block_size
    space = allocate_swap_space(
        model.kv_geometry, *sizes, model.back_end, options.swap_dir, model.device
    )
    make = CudaSwapper if model.device.type == "cuda" else Swapper
    return make(cache, space, model.back_end.copy_blocks)


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu or cuda; auto is the GPU where torch sees one and Triton is installed.

    Raises ConfigError where cuda is asked for and one of the two is missing.
    """
    if name == "cpu":
        return torch.device("cpu")
    missing = _what_cuda_lacks()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise ConfigError(f"device cuda: {missing}; use cpu or auto")
    return torch.device("cpu")


def _what_cuda_lacks() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install quire[gpu])"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
        return "there is no C compiler, of which Triton makes its launcher; install gcc"
    return None


def release_device_memory() -> None:
    """Let the GPU, if one was used, and the host have what nobody refers to any more: other processes want it.

    What stays is cuBLAS's workspace, a few dozen MiB, for as long as the process: others' graphs may point into it.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
        empty_host_cache()
