"""Memory planning before any weight is loaded, from config.json and headers of safetensors files. Loads no torch.

Shapes and block arithmetic are the engine's own (`model/shapes.py`, `engine/sizing.py`). Workspaces are an upper
estimate: the widest activations of a full step, and logits for every sequence.

Steps of T seconds leave T - d to the prompt, d the seconds of the decodes alone, so it takes T / (T - d) times as long
as alone. Nothing is simulated.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.cache.states import most_sequences
from quire.core.config import QUANTIZED, CacheConfig, KVDtype, SchedulerConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.image_processing import best_size, shrunk, tiled_grid
from quire.core.model_files import file_inside, is_gguf
from quire.core.options import parse_bytes
from quire.core.plan import StepPlan
from quire.core.speculation import METHODS_WITH_MODELS, ScratchBlocks
from quire.engine.formats import find_pooler, read_source
from quire.engine.options import EngineOptions
from quire.engine.sizing import PIXEL_BYTES, ModelLimits, most_image_tokens, size_engine, with_images
from quire.model.config import activation_bytes, expert_reads, num_parameters
from quire.model.kv_cache import KVGeometry, LayerTail
from quire.model.quantization import UNQUANTIZED
from quire.model.sharding import Mode, Shard, check_shardable
from quire.model.source import image_settings_of
from quire.model.spec import DecoderSpec, widest_window
from quire_lab.sim.footprint import (
    CPU_PACKING,
    DTYPE_BYTES,
    PLAIN_PACKING,
    Packing,
    vision_bytes,
    weight_bytes,
)
from quire_lab.sim.hardware import ExchangeMode, Exchanges, Hardware, exchange_mode
from quire_lab.sim.models import FoundModel

SHOWN_EDGE = 1024               # pixels of the image that a plan names, of a model that reads them in any size
MAX_HEADER_BYTES = 100 * 2**20  # as in safetensors itself
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one device. All bytes are of one device, also with tensor parallelism.

    With several engines (`data_parallel_size`) all but `memory_bytes` are of one of them.
    """

    model: str
    hardware: str
    dtype: str
    kv_cache_dtype: str
    num_devices: int
    num_ranks: int  # ranks on a CPU hold the weights and the cache together
    num_engines: int
    num_parameters: int
    quantization: str            # described in words; empty: none
    memory_bytes: int
    weight_bytes: int
    token_weight_bytes: int      # bytes that a step of one token reads: those of the experts that it uses
    has_experts: bool
    workspace_bytes: int
    table_bytes: int             # block tables and tokens of the running sequences, in host memory
    kv_bytes_per_token: int      # includes the draft model's, and a token's share of what a block keeps by itself
    num_convolutions: int        # layers that are short convolutions
    tail_bytes: int              # their part of a block, on all ranks of a CPU
    draft_weight_bytes: int      # bytes of a draft model or a head; not in `weight_bytes`
    draft_name: str              # the draft model's, or the head's; empty: none
    cache: CacheConfig
    scheduler: SchedulerConfig
    num_fitting: dict[int, int]  # requests at once, by their context length
    binds: str
    windows: str                 # described in words; empty: no layer has one
    exchanges: Exchanges         # between ranks or devices in a step of one token; zeros: there is one
    slot_bytes: int = 0          # states of a sequence at one place; 0: the model keeps none
    image_tokens: int = 0        # placeholders of an image; 0: the model reads text alone here
    image_bytes: int = 0         # an image's encoding
    image_size: str = ""         # pixels of that image, where they have any size
    vision_weight_bytes: int = 0  # the encoder of images, counted in `weight_bytes`, too
    most_image_tokens: int = 0   # placeholders of the largest image
    encoding_bytes: int = 0      # what it takes while it is encoded; the KV cache leaves room for it
    pixel_bytes: int = 0         # pixels that an engine and its server keep; the KV cache leaves room for them, too

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.cache.num_blocks * self.cache.block_size * self.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots for states."""
        return self.cache.num_state_slots * self.slot_bytes


def plan_memory(
    model: FoundModel, hardware: Hardware, options: EngineOptions, num_devices: int = 1, draft: FoundModel | None = None
) -> MemoryPlan:
    """Return the plan. Raises ConfigError, with the numbers, for a model that does not fit or sizes that cannot be.

    `num_devices`: alike GPUs with tensor parallelism; on a CPU, processes of the one machine, counted together.
    `draft`: the draft model of `options.speculation`; it is kept whole on each device.
    """
    if hardware.device != "cpu":
        model = model._replace(spec=replace(model.spec, vision=None))  # it is not loaded there
    spec, packing = model.spec, _packing(hardware)
    kv_dtype = packing.kernel_dtype(model.dtype) if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    num_seqs = options.resolved_max_num_seqs
    num_ranks = num_devices if hardware.device == "cpu" else 1
    num_devices //= num_ranks
    mode = options.tensor_parallel_mode_on(hardware.device)
    if num_devices * num_ranks > 1:
        check_shardable(spec, num_devices * num_ranks, mode)
    held = _held_bytes(model, options, packing, kv_dtype, None if num_devices == 1 else Shard(0, num_devices, mode))
    if num_ranks > 1:
        held = _held_by_ranks(model, options, kv_dtype, num_ranks, mode)
    token_bytes, slot_bytes, weights, token_weights = held
    widest = spec if num_devices * num_ranks == 1 else Shard(0, num_devices * num_ranks, mode).local_spec(spec)
    geometry = _geometry(widest, packing.kernel_dtype(model.dtype), options, kv_dtype)
    tails = [each for each in geometry.layers if isinstance(each, LayerTail)]
    draft_bytes, draft_token_bytes, scratch_bytes = _draft_bytes(draft, packing, options, kv_dtype)
    token_bytes += draft_token_bytes
    windows = [*spec.windows, *(() if draft is None else draft.spec.windows)]  # both models' layers share the blocks
    batched_tokens = hardware.default_batched_tokens
    workspaces = _workspace_bytes(model, options, options.batched_tokens(batched_tokens), num_devices)
    num_engines = options.data_parallel_size
    free_bytes = _free_bytes(model, hardware, options, num_devices, weights + draft_bytes, workspaces)
    if hardware.device == "cuda" and options.kv_cache_memory is None:
        options = replace(options, kv_cache_memory=free_bytes)
    longest, images = _default_positions(model, options), _images(model, packing, options, num_ranks)
    limits = ModelLimits(
        spec.max_position_embeddings, token_bytes, widest_window(windows), default_positions=longest,
        scratch_bytes=scratch_bytes, num_swap_shares=num_devices, positions_reason=spec.positions_reason,
        slot_bytes=slot_bytes,
    )  # fmt: skip
    if spec.vision is not None:
        most, itemsize = images["most_image_tokens"], DTYPE_BYTES[packing.kernel_dtype(model.dtype)]
        limits = with_images(options, limits, spec.vision, most, itemsize, free_bytes)
    cache, scheduler = size_engine(options, limits, free_bytes, default_batched_tokens=batched_tokens)
    kv_bytes = cache.num_blocks * cache.block_size * token_bytes + cache.num_state_slots * slot_bytes
    kv_bytes *= num_engines
    if kv_bytes > free_bytes:
        raise ConfigError(f"KV caches of {num_engines} engines take {kv_bytes} bytes, but {free_bytes} are free")
    length = scheduler.max_model_len
    return MemoryPlan(
        model=model.name,
        hardware=hardware.name,
        dtype=model.dtype,
        kv_cache_dtype=kv_dtype,
        num_devices=num_devices,
        num_ranks=num_ranks,
        num_engines=num_engines,
        num_parameters=num_parameters(spec),
        quantization="" if model.quantization == UNQUANTIZED else str(model.quantization),
        memory_bytes=int(hardware.memory_bytes),
        weight_bytes=weights,
        token_weight_bytes=token_weights,
        has_experts=expert_reads(spec) is not None,
        workspace_bytes=workspaces,
        table_bytes=4 * num_seqs * (length + math.ceil(length / cache.block_size)),
        kv_bytes_per_token=token_bytes,
        num_convolutions=len(tails),
        tail_bytes=num_ranks * sum(each.block_bytes(options.block_size)[0] for each in tails),
        draft_weight_bytes=draft_bytes,
        draft_name=_draft_name(draft),
        slot_bytes=slot_bytes,
        cache=cache,
        scheduler=scheduler,
        num_fitting=_num_fitting_by_length(cache, length, num_seqs),
        binds=_what_binds(cache, scheduler, options.max_model_len or longest),
        windows=describe_windows(windows),
        exchanges=_exchanges(model, packing, num_devices * num_ranks, exchange_mode(mode, hardware.device)),
        **images,
    )


def _images(model: FoundModel, packing: Packing, options: EngineOptions, num_ranks: int) -> dict[str, Any]:
    """Return the fields of images; each rank has all of the encoder, and encodes."""
    vision = model.spec.vision
    if vision is None:
        return {}
    element_bytes = DTYPE_BYTES[packing.kernel_dtype(model.dtype)]
    num_tokens, size = vision.num_tokens, ""
    if vision.merging is not None:
        side, size = round(SHOWN_EDGE / vision.unit), f"{SHOWN_EDGE} x {SHOWN_EDGE}"
        num_tokens = side * (side + vision.has_row_ends)
    if vision.tiles is not None:
        shown, size = (SHOWN_EDGE, SHOWN_EDGE), f"{SHOWN_EDGE} x {SHOWN_EDGE}"
        grid = tiled_grid(shown, best_size(shown, vision.tiles.sizes), vision.tiles.size, vision.grid)
        rows, columns = shrunk(grid, vision.grid, vision.tiles.most)
        num_tokens = vision.grid**2 + rows * (columns + 1)
    settings = None
    if model.folder is not None:
        settings = image_settings_of(read_source(model.folder, mmproj=options.mmproj), vision, options.pixel_limits)
    kept_bytes = parse_bytes(options.image_cache_memory, "image_cache_memory")
    most = most_image_tokens(vision, settings, kept_bytes // (vision.row_width * element_bytes))
    return {
        "most_image_tokens": most,
        "encoding_bytes": num_ranks * activation_bytes(vision, most, element_bytes),
        "pixel_bytes": PIXEL_BYTES,
        "image_tokens": num_tokens,
        "image_bytes": num_tokens * vision.row_width * element_bytes,
        "image_size": size,
        "vision_weight_bytes": num_ranks * vision_bytes(model.spec, model.dtype, packing, model.quantization),
    }


def _default_positions(model: FoundModel, options: EngineOptions) -> int:
    """Return the default of `max_model_len`: of a model that pools its folder may name a shorter one."""
    if model.folder is None:
        return model.spec.default_positions
    pooler = find_pooler(options.runner, model.folder, model.spec, options.hf_overrides)
    return pooler.max_seq_length or model.spec.default_positions


def _workspace_bytes(model: FoundModel, options: EngineOptions, num_tokens: int, num_devices: int) -> int:
    """Return the bytes of a device for the activations of a step of `num_tokens` and for its logits, in float32."""
    spec = model.spec
    inner = max((each.active_size for each in spec.feed_forwards), default=0)
    widest = 2 * spec.hidden_size + max(2 * inner, 3 * spec.mixed_width) // num_devices
    return num_tokens * widest * DTYPE_BYTES[model.dtype] + options.resolved_max_num_seqs * spec.vocab_size * 4


def _free_bytes(
    model: FoundModel, hardware: Hardware, options: EngineOptions, num_devices: int, weights: int, workspaces: int
) -> int:
    """Return the bytes of a device that its engines leave for KV caches. ConfigError for a model that does not fit."""
    num_engines = options.data_parallel_size
    share = 1.0 if hardware.device == "cpu" else options.gpu_memory_utilization
    free_bytes = int(hardware.memory_bytes * share) - num_engines * (weights + workspaces)
    if free_bytes > 0:
        return free_bytes
    engines = "" if num_engines == 1 else f" for each of {num_engines} engines"
    raise ConfigError(
        f"{model.name} does not fit: weights of {weights} bytes and workspaces of {workspaces}{engines} on each of "
        f"{num_devices} devices with {int(hardware.memory_bytes * share)}; more devices or a smaller dtype may help"
    )


class _HeldBytes(NamedTuple):
    """Bytes of a device or a rank: of a token's keys and values, of a slot, of weights, of those that a token reads."""

    token: int
    slot: int  # states of a sequence
    weights: int
    token_weights: int


def _held_bytes(
    model: FoundModel, options: EngineOptions, packing: Packing, kv_dtype: str, shard: Shard | None = None
) -> _HeldBytes:
    """Return what a device holds; of several GPUs the first has the most. None: all of the model."""
    local = model.spec if shard is None else shard.local_spec(model.spec)
    weights, token_weights = (
        weight_bytes(model.spec, model.dtype, packing, quantization=model.quantization, shard=shard, of_one_token=each)
        for each in (False, True)
    )
    geometry = _geometry(local, packing.kernel_dtype(model.dtype), options, kv_dtype)
    return _HeldBytes(geometry.bytes_per_token(options.block_size), geometry.slot_bytes, weights, token_weights)


def _geometry(spec: DecoderSpec, own_dtype: str, options: EngineOptions, stored: str) -> KVGeometry:
    """Return the geometry of a model, or of a rank's part of it; keys and values are stored in `stored`."""
    kept = QUANTIZED.get(stored) or KVDtype(stored)
    return KVGeometry.of(spec, *kept, tail_dtype=own_dtype, max_truncated=options.max_truncated)


def _held_by_ranks(
    model: FoundModel, options: EngineOptions, kv_dtype: str, num_ranks: int, mode: Mode
) -> _HeldBytes:
    """Return what all ranks of a CPU hold together; they have as many blocks and slots as the one with the most heads.
    """
    shards = [Shard(rank, num_ranks, mode) for rank in range(num_ranks)]
    ranks = [_held_bytes(model, options, CPU_PACKING, kv_dtype, shard) for shard in shards]
    token_bytes, slot_bytes, weights, token_weights = zip(*ranks, strict=True)
    most = num_ranks * max(token_bytes), num_ranks * max(slot_bytes)
    return _HeldBytes(*most, sum(weights), sum(token_weights))


def _exchanges(model: FoundModel, packing: Packing, num_ranks: int, mode: ExchangeMode) -> Exchanges:
    itemsize = DTYPE_BYTES[packing.kernel_dtype(model.dtype)]
    return Exchanges(0, 0) if num_ranks == 1 else Exchanges.of(model.spec, itemsize, num_ranks, mode)


def describe_windows(windows: Sequence[int | None]) -> str:
    """Return in words how many layers have a window, and whether blocks before it are freed; empty if none has."""
    widths = sorted({window for window in windows if window is not None})
    if not widths:
        return ""
    num_windowed = sum(window is not None for window in windows)
    spans = " and ".join(f"{width:,}" for width in widths)
    if num_windowed == len(windows):
        return f"{spans} tokens in all layers: blocks before the last {widths[-1]:,} tokens are freed early"
    return f"{spans} tokens in {num_windowed} of {len(windows)} layers: no block is freed early, the others need all"


def _draft_bytes(
    draft: FoundModel | None, packing: Packing, options: EngineOptions, kv_dtype: str
) -> tuple[int, int, int]:
    """Return the bytes of a draft model: of its weights, of a token in its cache, and of its scratch blocks."""
    if draft is None or options.speculation is None:
        return 0, 0, 0
    geometry = _geometry(draft.spec, packing.kernel_dtype(draft.dtype), options, kv_dtype)
    token_bytes = geometry.bytes_per_token(options.block_size)
    num_drafts = options.speculation.num_speculative_tokens
    scratch = ScratchBlocks.of(num_drafts, options.resolved_max_num_seqs, options.block_size)
    weights = weight_bytes(draft.spec, draft.dtype, packing, quantization=draft.quantization)
    return weights, token_bytes, scratch.num_blocks * options.block_size * token_bytes


def _draft_name(draft: FoundModel | None) -> str:
    if draft is None:
        return ""
    return "MTP head" if draft.spec.is_mtp else "draft model" if draft.spec.eagle is None else "EAGLE-3 head"


def not_servable_yet(model: FoundModel, hardware: Hardware, options: EngineOptions, num_devices: int = 1) -> list[str]:
    """Return the reasons for which the engine would refuse to serve what `plan_memory` plans; usually none."""
    reasons = []
    if num_devices > 1 and hardware.device == "cuda" and options.enable_lora:
        reasons.append(f"enable_lora is not supported yet with tensor_parallel_size {num_devices} on device cuda")
    speculation = options.speculation
    if speculation is not None and speculation.method in METHODS_WITH_MODELS:
        what = METHODS_WITH_MODELS[speculation.method]
        if hardware.device == "cuda":
            reasons.append(f"{what} is not supported yet on device cuda")
    if hardware.device == "cuda" and options.data_parallel_size > 1:
        reasons.append(f"data_parallel_size {options.data_parallel_size} is not supported yet on device cuda")
    own_dtype, kv_dtype = _packing(hardware).kernel_dtype(model.dtype), options.kv_cache_dtype
    if kv_dtype not in ("auto", own_dtype, *QUANTIZED):
        reasons.append(
            f"a KV cache of {kv_dtype} is not supported yet: keys and values of a {model.dtype} model are stored in "
            f"{own_dtype}"
        )
    return reasons


def _packing(hardware: Hardware) -> Packing:
    return CPU_PACKING if hardware.device == "cpu" else PLAIN_PACKING


def _num_fitting_by_length(cache: CacheConfig, longest: int, most: int) -> dict[int, int]:
    """Return how many requests the KV cache holds, at most `most`, of the longest and of some shorter lengths."""
    if cache.num_state_slots:
        most = min(most, most_sequences(cache.num_state_slots))
    lengths = sorted({longest, *(short for short in _LENGTHS if short < longest)})
    return {length: min(most, _num_fitting(cache, length, most)) for length in lengths}


def _num_fitting(cache: CacheConfig, length: int, most: int) -> int:
    """Return how many requests of a length the KV cache holds; `most` if the model needs none."""
    return cache.num_blocks // math.ceil(length / cache.block_size) if cache.num_blocks else most


def _what_binds(cache: CacheConfig, scheduler: SchedulerConfig, longest: int) -> str:
    """Return the setting or resource that bounds the number of full-length requests at once."""
    if scheduler.max_model_len < longest:
        return f"KV cache: {scheduler.max_model_len} tokens are the longest request, the model takes {longest}"
    num_fitting = _num_fitting(cache, longest, scheduler.max_num_seqs)
    num_states = most_sequences(cache.num_state_slots) if cache.num_state_slots else num_fitting
    if num_states < min(num_fitting, scheduler.max_num_seqs):
        return f"slots for states: {cache.num_state_slots} are for {num_states} sequences at once"
    if num_fitting >= scheduler.max_num_seqs:
        return f"max_num_seqs: {scheduler.max_num_seqs} requests of {longest} tokens fit"
    return f"KV cache: {num_fitting} requests of {longest} tokens fit, max_num_seqs is {scheduler.max_num_seqs}"


def stored_parameters(folder: Path, mmproj: str | None = None) -> int:
    """Return the number of parameters in the safetensors files of a folder, by their headers, or in a GGUF file.

    mmproj: the file of an encoder of images beside a GGUF file. 0 if there is none. Raises ModelError for a file that
    is none.
    """
    if is_gguf(folder):
        from quire.formats.gguf.gguf_source import num_elements  # noqa: PLC0415 (for such files alone)

        return num_elements(folder) + (0 if mmproj is None else num_elements(Path(mmproj).expanduser()))
    return sum(_parameters_in(file_inside(folder, path.name)) for path in sorted(folder.glob("*.safetensors")))


def _parameters_in(path: Path) -> int:
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)))
            entries = (entry for name, entry in header.items() if name != "__metadata__")
            return sum(math.prod(entry["shape"]) for entry in entries)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error


CONTEXT_LEN = 1024  # tokens of each sequence that decodes, or the longest that the model takes


class TargetPrice(NamedTuple):
    """Cost of a target beside a number of decodes."""

    num_decodes: int
    decode_s: float
    price: float | None  # None: the decodes alone take as long as the target

    def __str__(self) -> str:
        decodes = f"{self.num_decodes} decode{'s' if self.num_decodes > 1 else ''} of {self.decode_s * 1e3:.3g} ms"
        return f"{'target missed' if self.price is None else f'{self.price:.2f} x'} beside {decodes}"


def target_prices(
    step_s: Callable[[StepPlan], float], target_s: float, nums_decodes: Iterable[int], context_len: int
) -> list[TargetPrice]:
    """Return the prices of a target beside so many decodes, each with a context of `context_len` tokens.

    `step_s` returns the seconds of a plan.
    """
    prices = []
    for num in nums_decodes:
        rows = list(range(num))
        plan = StepPlan(rows=rows, starts=[context_len - 1] * num, counts=[1] * num, sample_rows=rows)
        decode_s = step_s(plan)
        prices.append(TargetPrice(num, decode_s, target_s / (target_s - decode_s) if decode_s < target_s else None))
    return prices
