"""Model loading: from the options of an engine to a model on its device, and the figures that size the engine."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.core.errors import ConfigError, ModelError
from quire.core.pooling import PoolerConfig
from quire.engine.device_sizing import positions_for
from quire.engine.devices import resolve_device
from quire.engine.formats import read_source
from quire.engine.generation_config import eos_token_ids, sampling_defaults
from quire.engine.options import EngineOptions
from quire.engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from quire.engine.sizing import ModelLimits
from quire.execution.device_memory import use_exact_products
from quire.execution.memory_profiling import CudaMemoryMeter
from quire.kernels.back_end import choose_back_end
from quire.kernels.support import require_kv_dtype
from quire.model.kv_geometry import KVGeometry
from quire.model.language_model import LanguageModel
from quire.model.loader import load_model
from quire.model.pooler import find_pooler
from quire.model.quantization import UNQUANTIZED, Quantization
from quire.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device. `meter` measures the GPU's memory; None on a CPU.

    `pooler`: None for a model that gives no vectors, for `no_pooler_reason`. `has_head`: False if it cannot generate.
    """

    model: LanguageModel
    limits: ModelLimits
    eos_token_ids: frozenset[int]
    meter: CudaMemoryMeter | None
    quantization: Quantization = UNQUANTIZED
    sampling: SamplingDefaults = NO_DEFAULTS
    pooler: PoolerConfig | None = None
    no_pooler_reason: str = ""
    has_head: bool = True


def load(options: EngineOptions, folder: Path) -> LoadedModel:
    """Load the model of a folder or file. ModelError and ConfigError name what is not supported."""
    source = read_source(folder)
    spec, sampling, ends = source.spec, sampling_defaults(options, folder), eos_token_ids(options, source)
    pooler = find_pooler(options.runner, folder, spec, options.hf_overrides)
    if not spec.has_head and pooler.config is None:
        raise ModelError(f"{folder}: the model has no output head, and gives no vectors: {pooler.reason}")
    device = resolve_device(options.device)
    if device.type == "cuda" and options.data_parallel_size > 1:
        raise ConfigError(f"data_parallel_size {options.data_parallel_size} is not supported yet on device cuda")
    back_end = choose_back_end(device, isa=options.cpu_isa, head_dim=spec.head_dim)
    meter = _cuda_memory_meter(device) if device.type == "cuda" else None
    dtype = getattr(torch, source.dtype(options.dtype))
    require_kv_dtype(back_end.name, options.kv_cache_dtype)
    stored = back_end.cache_layout.stored_dtype(dtype, options.kv_cache_dtype)
    limits = _limits(spec, KVGeometry.of(spec, *stored))
    num_positions = positions_for(options, limits, meter)
    quantization = source.quantization(options.quantization_options)
    model = load_model(
        source, dtype=options.dtype, device=device, back_end=back_end, max_positions=options.max_model_len,
        table_positions=num_positions, kv_cache_dtype=options.kv_cache_dtype,
        quantization=quantization, needs_head=pooler.config is None or pooler.config.is_reranker,
    )  # fmt: skip
    limits = replace(limits, max_position_embeddings=num_positions, default_positions=None)
    return LoadedModel(
        model, limits, ends, meter, quantization, sampling, pooler.config, pooler.reason, model.spec.has_head
    )


def _limits(spec: DecoderSpec, geometry: KVGeometry) -> ModelLimits:
    """Return the limits of a model; `geometry` is that of all models that share the block tables."""
    table_bytes = sum(rotary.head_dim for rotary in spec.rotaries) * torch.float32.itemsize
    return ModelLimits(
        spec.max_position_embeddings,
        geometry.bytes_per_token,
        geometry.sliding_window,
        table_bytes,
        spec.default_positions,
    )


def _cuda_memory_meter(device: torch.device) -> CudaMemoryMeter:
    """Prepare a GPU before the model is loaded; return the meter of its memory."""
    use_exact_products()
    return CudaMemoryMeter(device)
