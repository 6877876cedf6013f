"""Model loading: from the options of an engine to a model on its device, and the figures that size the engine."""

import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.arrays import FLOAT32, dtype_name
from quire.core.errors import ConfigError, ModelError
from quire.core.image_processing import ImageSettings, PixelLimits
from quire.core.kv_identity import KVIdentity
from quire.core.pooling import PoolerConfig
from quire.engine.devices import open_device
from quire.engine.formats import find_pooler, read_source
from quire.engine.messages import NO_DEFAULTS, SamplingDefaults
from quire.engine.options import EngineOptions
from quire.engine.requests.generation_config import eos_token_ids, sampling_defaults
from quire.engine.sizing import ModelLimits, table_positions
from quire.execution.device import Device
from quire.extension.isas import usable_isas
from quire.kernels.back_end import require_kv_dtype, serves_head_dim
from quire.kernels.choice import choose_back_end
from quire.kernels.paged_attention import AttentionBackEnd
from quire.model.decoder import Decoder
from quire.model.draft_head import DraftHead
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import LanguageModel
from quire.model.loader import load_model
from quire.model.quantization import UNQUANTIZED, Quantization
from quire.model.sharding import Ranks, Shard, check_shardable
from quire.model.source import image_settings_of
from quire.model.spec import DecoderSpec, VisionSpec

if TYPE_CHECKING:
    from quire.model.packed_weights import PackedPlace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device.

    `pooler`: None for a model that gives no vectors, for `no_pooler_reason`. `generates`: it has logits of next tokens.
    """

    model: LanguageModel
    limits: ModelLimits
    eos_token_ids: frozenset[int]
    device: Device
    quantization: Quantization = UNQUANTIZED
    sampling: SamplingDefaults = NO_DEFAULTS
    pooler: PoolerConfig | None = None
    no_pooler_reason: str = ""
    generates: bool = True
    image_settings: ImageSettings | None = None  # None: the model reads text alone, or its files have no such settings


def load(
    options: EngineOptions, folder: Path, open_ranks: Callable[[DecoderSpec, int], tuple[Ranks, int]] | None = None,
    attention: AttentionBackEnd | None = None, *, must_write: bool = False,
) -> LoadedModel:  # fmt: skip
    """Load the model of a folder or file. ModelError and ConfigError name what is not supported.

    `open_ranks`: of tensor parallelism, from the number of positions of tables to this rank and the number of all;
    this rank's part of the model is loaded. `attention`: what `attention_backend` names, in place of Triton's.
    `must_write`: OSError where packed weights cannot be written.
    """
    source = read_source(folder, options.load_format, options.mmproj)
    spec, sampling, ends = source.spec, sampling_defaults(options, folder), eos_token_ids(
        options, source.path, source.spec.vocab_size, source.eos_token_ids
    )
    pooler = find_pooler(options.runner, folder, spec, options.hf_overrides)
    if not spec.generates and pooler.config is None:
        what = "has no output head" if spec.is_causal else "is an encoder"
        raise ModelError(f"{folder}: the model {what}, and gives no vectors: {pooler.reason}")
    if not spec.is_causal:
        check_encoder(options)
    device = open_device(options)
    device_type = str(device.tensor_device).partition(":")[0]
    check_device(options, device_type)
    if options.pixel_limits != PixelLimits() and (spec.vision is None or not spec.vision.has_places):
        what = (
            "reads text alone" if spec.vision is None else "reads images of one size" if spec.vision.merging is None
            and spec.vision.tiles is None else "bounds edges of images, not their area"
        )  # fmt: skip
        raise ConfigError(f"mm_processor_kwargs {options.mm_processor_kwargs!r}: the model {what}")
    head_dim = spec.head_dim
    if spec.vision is not None and device_type == "cpu" and serves_head_dim(head_dim):
        head_dim = spec.vision.tower.head_dim   # the encoder runs on the same back end
    back_end = choose_back_end(
        device.tensor_device, isa=options.cpu_isa, head_dim=head_dim, is_exact=options.exact is True,
        attention=attention,
    )  # fmt: skip
    if options.capture_graphs and not back_end.is_capturable:
        raise ConfigError(
            f"capture_graphs True is not supported with attention_backend {options.attention_backend}: it plans each "
            "step on the host"
        )
    dtype = back_end.library.dtype(source.dtype(options.dtype))
    require_kv_dtype(back_end.attention, options.kv_cache_dtype)
    stored = back_end.cache_layout.stored_dtype(dtype, options.kv_cache_dtype)
    num_ranks = options.tensor_parallel_size
    if num_ranks > 1:
        check_ranks(options, back_end.name, spec)
    if spec.has_tails:
        check_tails(options)
    if spec.has_states:
        check_states(options, device_type)
    num_local = num_ranks // options.nnodes if device_type == "cpu" else 1  # a GPU's memory is that of one
    max_truncated = options.max_truncated
    mode = options.tensor_parallel_mode_on(device_type)
    specs = [spec] if num_ranks == 1 else [Shard(rank, num_ranks, mode).local_spec(spec) for rank in range(num_ranks)]
    geometry = _widest(specs, stored, back_end.cache_layout.stored_dtype(dtype).element, max_truncated)
    limits = _limits(spec, geometry, num_local, options.block_size)
    limits = replace(
        limits, default_positions=pooler.max_seq_length or limits.default_positions,
        num_swap_shares=num_ranks // options.nnodes // num_local,
    )  # fmt: skip
    num_positions, ranks = table_positions(options, limits, device.free_bytes(), device.kv_share), None
    if open_ranks is not None:
        ranks, num_positions = open_ranks(spec, num_positions)
    quantization = source.quantization(options.quantization_options)
    model = load_model(
        source, dtype=options.dtype, device=device.tensor_device, back_end=back_end,
        max_positions=options.max_model_len, table_positions=num_positions, kv_cache_dtype=options.kv_cache_dtype,
        quantization=quantization, needs_head=pooler.config is None or pooler.config.is_reranker, ranks=ranks,
        packed=packed_place(options, back_end.name, must_write=must_write), max_truncated=max_truncated,
    )  # fmt: skip
    limits = replace(limits, max_position_embeddings=num_positions, default_positions=None)
    return LoadedModel(
        model, limits, ends, device, quantization, sampling, pooler.config, pooler.reason, model.spec.generates,
        None if spec.vision is None else image_settings_of(source, spec.vision, options.pixel_limits),
    )


def packed_place(options: EngineOptions, back_end: str, *, must_write: bool) -> "PackedPlace | None":
    """Return where packed weights are; None: there are none. ConfigError where they are not served."""
    if options.packed_weights is None:
        return None
    if back_end != "cpp" or options.tensor_parallel_size > 1 or options.mmproj is not None:
        reason = (
            f"the back end {back_end} does not pack weights like that" if back_end != "cpp"
            else f"mmproj {options.mmproj!r} is a second file, which is not packed" if options.mmproj is not None
            else f"tensor_parallel_size {options.tensor_parallel_size} packs parts of weights"
        )  # fmt: skip
        raise ConfigError(f"packed_weights {options.packed_weights!r}: {reason}; leave it out")
    from quire.model.packed_weights import PackedPlace  # noqa: PLC0415 (of the C++ back end alone)

    return PackedPlace(Path(options.packed_weights).expanduser(), must_write)


def kv_identity(
    options: EngineOptions, loaded: LoadedModel, cache: KVCache, draft_model: LanguageModel | DraftHead | None = None,
    rank: int = 0,
) -> KVIdentity:
    """Return the identity of what an engine writes to its KV cache. It reads all weights once, from memory.

    cache: with the layers of the draft model, if there is one. Raises ConfigError for a back end other than the C++
    kernels': identities of GPUs are not there yet.
    """
    model, num_ranks = loaded.model, options.tensor_parallel_size
    spec, weights, rotary = _model_digests(model)
    stored = {" ".join((each.dtype, each.scale_dtype or "without scales")) for each in model.kv_geometry.layers}
    forms: list[object] = [(each.shape[1:], dtype_name(each.dtype)) for each in cache.tensors]
    forms += (f"state {each}" for each in model.kv_geometry.states)
    block_bytes = sum(each.nbytes // len(each) for each in cache.tensors)
    return KVIdentity(
        model=spec,
        weights=weights,
        dtype=dtype_name(model.dtype),
        quantization="" if loaded.quantization == UNQUANTIZED else str(loaded.quantization),
        kv_dtype=", ".join(sorted(stored)),
        block_size=cache.block_size,
        layout=f"{len(forms)} tensors, {block_bytes} bytes, {sys.byteorder}-endian, {_sha256(repr(forms))}",
        arithmetic=f"cpp {usable_isas()[0] if options.cpu_isa == 'auto' else options.cpu_isa}",
        rotary=rotary,
        parallel="" if num_ranks == 1 else f"{options.tensor_parallel_mode_on('cpu')}, rank {rank} of {num_ranks}",
        draft="" if draft_model is None else _sha256(repr(_model_digests(draft_model))),
    )


def images_digest(vision: VisionSpec, settings: ImageSettings) -> bytes:
    """Return a digest of what the rows of an image depend on beside its pixels and the weights: `StoredKeys.kind`."""
    return hashlib.sha256(repr((vision, settings.scale, settings.mean, settings.std)).encode()).digest()


def _model_digests(model: LanguageModel | DraftHead) -> tuple[str, str, str]:
    """Return digests of a model's spec, of its weights, and of the frequencies of its rotary tables.

    A table is a function of these and of the position. Its length is not in it: that depends on the free memory.
    """
    if model.back_end.name != "cpp" or not isinstance(model, Decoder | DraftHead):
        raise ConfigError(f"keys and values of the back end {model.back_end.name} have no identity, and are not stored")
    from quire.model.packed_weights import weights_digest  # noqa: PLC0415 (of the C++ back end alone)

    tables = [(each, frequencies.tobytes()) for each, frequencies in model.frequencies.items()]
    return _sha256(repr(model.spec)), weights_digest(model), _sha256(repr(tables))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_device(options: EngineOptions, device_type: str) -> None:
    """Raise ConfigError for settings that a device does not serve, whatever the model."""
    if device_type == "cuda":
        if options.data_parallel_size > 1:
            raise ConfigError(f"data_parallel_size {options.data_parallel_size} is not supported yet on device cuda")
        return
    if options.exact is False:
        raise ConfigError("exact False is not supported on device cpu: its answers never depend on other requests")
    if options.capture_graphs:
        raise ConfigError("capture_graphs True is not supported on device cpu: there are no CUDA graphs")
    for name in ("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(options, name):
            log.info("%s has no effect on device cpu: there are no CUDA graphs", name)
    if options.attention_backend != "auto":
        name = options.attention_backend
        raise ConfigError(f"attention_backend {name!r} is not supported on device cpu: its own kernels serve there")


def check_encoder(options: EngineOptions) -> None:
    """Raise ConfigError for an option that a model without a KV cache does not have."""
    refused = {
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "data_parallel_size": options.data_parallel_size > 1,
        "enable_lora": options.enable_lora,
        "kv_cache_dtype": options.kv_cache_dtype != "auto",
        "speculative_config": options.speculation is not None,
        "memory_policy": options.memory_policy != "paged",
        "batching": options.batching != "continuous",
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name} {getattr(options, name)!r}: not supported for an encoder")


def check_tails(options: EngineOptions) -> None:
    """Raise ConfigError for an option that has not been tried with what blocks keep for short convolutions."""
    if (value := options.memory_policy) != "paged":
        raise ConfigError(f"memory_policy {value!r} is not supported for a model with short convolutions; use 'paged'")


def check_states(options: EngineOptions, device_type: str) -> None:
    """Raise ConfigError for an option that does not reach the states that a model keeps of sequences."""
    plain = {"memory_policy": "paged", "batching": "continuous", "kv_events": None}
    for name, value in plain.items():
        if (given := getattr(options, name)) != value:
            raise ConfigError(f"{name} {given!r} is not supported for a model that keeps states; use {value!r}")
    if device_type == "cuda":
        raise ConfigError("device 'cuda' is not supported for a model that keeps states; use 'cpu'")


def check_ranks(options: EngineOptions, back_end: str, spec: DecoderSpec) -> None:
    """Raise ConfigError for what tensor parallelism does not serve."""
    name = f"tensor_parallel_size {options.tensor_parallel_size}"
    if back_end not in ("cpp", "cuda"):
        raise ConfigError(f"{name} needs the C++ kernels of device cpu, which do not serve this model here")
    if options.memory_policy != "paged" or options.batching != "continuous":
        raise ConfigError(f"{name} needs memory_policy 'paged' and batching 'continuous'")
    mode = options.tensor_parallel_mode_on("cuda" if back_end == "cuda" else "cpu")
    check_shardable(spec, options.tensor_parallel_size, mode)


def _widest(
    specs: Sequence[DecoderSpec], stored: tuple[str, str | None], tail_dtype: str, max_truncated: int
) -> KVGeometry:
    """Return the geometry of the rank that keeps the most, all ranks having as many blocks, and as many slots."""
    ranks = [KVGeometry.of(each, *stored, tail_dtype=tail_dtype, max_truncated=max_truncated) for each in specs]
    widest = max(ranks, key=lambda geometry: geometry.bytes_per_token(1))
    return replace(widest, states=max(ranks, key=lambda geometry: geometry.slot_bytes).states)


def _limits(spec: DecoderSpec, geometry: KVGeometry, num_ranks: int, block_size: int) -> ModelLimits:
    """Return the limits of a model of which the memory that is measured has `num_ranks` ranks.

    `geometry` is that of a rank, for all models that share the block tables.
    """
    table_bytes = sum(rotary.head_dim for rotary in spec.rotaries) * FLOAT32.itemsize
    return ModelLimits(
        spec.max_position_embeddings,
        num_ranks * geometry.bytes_per_token(block_size),
        geometry.sliding_window,
        table_bytes,
        spec.default_positions,
        positions_reason=spec.positions_reason,
        has_tails=geometry.has_tails,
        slot_bytes=num_ranks * geometry.slot_bytes,
    )
