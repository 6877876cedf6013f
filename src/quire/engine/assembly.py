"""Engine assembly: load the model, size the cache, build the scheduler and the executor."""

import importlib.util
import ipaddress
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from quire.cache.disk_tier import DiskTier
from quire.cache.kv_tickets import Tickets
from quire.cache.loads import Loads
from quire.cache.manager import KVCacheManager
from quire.cache.stored_blocks import StoredBlocks
from quire.core.arrays import dtype_name
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.images import NUM_CHANNELS, ImageInputs
from quire.core.optional_package import needs_library
from quire.core.options import parse_bytes
from quire.core.sequence import Request
from quire.core.speculation import METHODS_WITH_MODELS
from quire.decoding.grammars.constrained import ConstrainedDecoding, TokenizerText
from quire.engine.adapters.store import (
    AdapterStore,
    make_slots,
    make_store,
)
from quire.engine.draft_model_loading import (
    LoadedDraftModel,
    load_draft_model,
    load_eagle_head,
    load_mtp_head,
)
from quire.engine.engine import TEXT_ALONE, Engine
from quire.engine.formats import TokenizerUse, load_tokenizer, tokenizer_loader
from quire.engine.kv_disk import KVDisk
from quire.engine.kv_sessions import KVSessions
from quire.engine.launcher import FleetMember, member_name
from quire.engine.loading import LoadedModel, images_digest, kv_identity, load
from quire.engine.messages import Ready
from quire.engine.options import EngineOptions
from quire.engine.recording.fault_files import keep_recent_plans
from quire.engine.recording.recorded_scheduler import RecordedScheduler, make_recorded_scheduler
from quire.engine.requests.input_processor import InputProcessor
from quire.engine.sizing import most_image_tokens, size_engine, with_images
from quire.execution.batch import AdapterRows, PersistentBatch
from quire.execution.device import HostDevice, StepLimits
from quire.execution.drafter import Drafter
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.drafters import make_drafter
from quire.execution.image_rows import ImageRows
from quire.execution.worker import StepCompute
from quire.extension.isas import usable_isas
from quire.kernels.paged_attention import AttentionBackEnd
from quire.model.config import UnknownArchitectureError, expert_reads, num_layer_weights
from quire.model.decoder import MAX_STEP_IMAGE_TOKENS, Decoder
from quire.model.draft_head import DraftHead
from quire.model.kv_cache import KVCache
from quire.model.language_model import LanguageModel
from quire.model.merging_vision import MergingTower, merged_flops
from quire.model.quantization import UNQUANTIZED
from quire.model.resolve import resolve_model, resolve_tokenizer
from quire.model.spec import DecoderSpec
from quire.model.tiled_vision import TiledTower
from quire.model.vision import VisionTower, flops
from quire.scheduling.image_encodings import ImageEncodings
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire.scheduling.waiting_lines import Lack
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.kv_consumer import KVPeers
    from quire.engine.parallel.rank_set import RankSet
    from quire.kernels.triton.triton_low_rank import TritonSlots

@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine that is ready to step, its model, and what checks its requests."""

    options: EngineOptions
    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    loaded: LoadedModel
    ready: Ready
    ranks: "RankSet | None" = None  # the other ranks of tensor parallelism; None: there are none
    member: FleetMember | None = None   # its place among engines that move KV blocks; None: it is not one of them

    @property
    def model(self) -> LanguageModel:
        """The model on its device."""
        return self.loaded.model

    def close(self) -> None:
        """End other ranks, connections to engines, and the record; write to the disk what is queued. Idempotent."""
        if self.engine.peers is not None:
            self.engine.peers.close()
        if self.engine.disk is not None:
            self.engine.disk.close()
        if self.ranks is not None:
            self.ranks.close()
        if isinstance(self.engine.scheduler, RecordedScheduler):
            self.engine.scheduler.close()


def assemble(
    options: EngineOptions, *, loads_tokenizer: bool, loaded: LoadedModel | None = None,
    tokenizer: Tokenizer | None = None, member: FleetMember | None = None,
) -> AssembledEngine:  # fmt: skip
    """Return an engine for the options. ModelError and ConfigError name what is not supported.

    The engine process loads no tokenizer: the server has it. `loaded`, `tokenizer`: those that are there already.
    """
    ranks = _ranks(options)
    try:
        return _assemble(options, ranks, loaded, tokenizer, member, loads_tokenizer=loads_tokenizer)
    except BaseException as error:
        if ranks is not None:
            ranks.close(str(error))
        raise


def _assemble(
    options: EngineOptions, ranks: "RankSet | None", loaded: LoadedModel | None, tokenizer: Tokenizer | None,
    member: FleetMember | None, *, loads_tokenizer: bool,
) -> AssembledEngine:  # fmt: skip
    folder = resolve_model(options.model, options.model_files, options.revision)
    text_source = resolve_tokenizer(options.tokenizer, folder, options.tokenizer_revision)
    if tokenizer is not None or not loads_tokenizer:
        loaded = loaded or _load_model(options, folder, ranks)
        read_tokenizer = None if options.skip_tokenizer_init else tokenizer_loader(text_source)
        draft_model = _draft_model(options, loaded, folder, text_source)
        return build_engine(options, loaded, tokenizer, read_tokenizer, draft_model, ranks, member)
    use: TokenizerUse = "skipped" if options.skip_tokenizer_init else "optional"
    with ThreadPoolExecutor(1) as reader:  # a CPU is free while kernels read weights without Python's lock
        reading = reader.submit(load_tokenizer, text_source, use)
        loaded = loaded or _load_model(options, folder, ranks)
        draft_model = _draft_model(options, loaded, folder, text_source)
        return build_engine(options, loaded, reading.result(), draft_model=draft_model, ranks=ranks, member=member)


def load_alone(options: EngineOptions) -> LoadedModel:
    """Return the model of one rank on its device. Errors as in `assemble`."""
    return _load(options, resolve_model(options.model, options.model_files, options.revision))


def _load_model(options: EngineOptions, folder: Path, ranks: "RankSet | None") -> LoadedModel:
    return _load(options, folder) if ranks is None else ranks.join(load(options, folder, ranks.open))


def _ranks(options: EngineOptions) -> "RankSet | None":
    """Return the other ranks that the options ask for. Raises ConfigError where they cannot run."""
    if options.tensor_parallel_size == 1:
        return None
    from quire.engine.parallel.starters import make_rank_set  # noqa: PLC0415 (for the start of one rank)

    return make_rank_set(options)


def _load(options: EngineOptions, folder: Path) -> LoadedModel:
    """Return the model on its device: that of a family, or else through transformers, as `model_impl` says."""
    if options.model_impl != "transformers":
        try:
            return load(options, folder, attention=_attention(options))
        except UnknownArchitectureError as error:
            unknown = error
        is_there = importlib.util.find_spec("transformers") is not None
        if options.model_impl == "quire" or not is_there:
            raise unknown
    setting, extra = "model_impl 'transformers'", "'quire[transformers]'"
    with needs_library(setting, "torch", extra), needs_library(setting, "transformers", extra):
        # Takes seconds to import: only for models that need it.
        from quire.engine.transformers_model.transformers_loading import knows, load_through_transformers  # noqa: PLC0415
    if options.model_impl == "auto" and not knows(folder):
        raise unknown
    return load_through_transformers(options, folder)


def _attention(options: EngineOptions) -> AttentionBackEnd | None:
    """Return what the options name in place of Triton's attention."""
    if options.attention_backend == "cuda":
        from quire.kernels.cuda.cuda_attention import CUDA_ATTENTION  # noqa: PLC0415 (loads torch)

        return CUDA_ATTENTION
    if options.attention_backend == "flashinfer":
        from quire.kernels.cuda.flashinfer_attention import FLASHINFER_ATTENTION  # noqa: PLC0415 (loads torch)

        return FLASHINFER_ATTENTION
    return None


def build_engine(
    options: EngineOptions, loaded: LoadedModel, tokenizer: Tokenizer | None = None,
    read_tokenizer: Callable[[], Tokenizer] | None = None, draft_model: LoadedDraftModel | None = None,
    ranks: "RankSet | None" = None, member: FleetMember | None = None,
) -> AssembledEngine:  # fmt: skip
    """Return an engine for any loaded model. `read_tokenizer`, without a `tokenizer`: called once, in a thread.

    That begins at once, for grammars: reading a vocabulary holds the interpreter lock, 1.2 s for 151,646 tokens, which
    would be a pause of all streams when the first grammar arrives. With a `tokenizer` it waits for the first grammar.
    """
    read = read_tokenizer if tokenizer is None else lambda: tokenizer
    grammars = None if read is None else _grammars(options, loaded, read)
    if grammars is not None and tokenizer is None:
        grammars.load()
    limits = loaded.limits if draft_model is None else draft_model.limits(loaded.limits, options.block_size)
    slots, device = _adapter_slots(options, loaded.model, ranks), loaded.device
    step = StepLimits(
        options.resolved_max_num_seqs, options.batched_tokens(device.default_batched_tokens),
        limits.max_position_embeddings, options.block_size,
    )  # fmt: skip
    kv_bytes = device.kv_bytes(loaded.model, step, slots) if ranks is None else ranks.kv_bytes(device, step, slots)
    images = _image_inputs(options, loaded, ranks, step.max_num_batched_tokens)
    if isinstance(images, ImageInputs):
        vision = _vision(loaded.model, ranks)
        most = most_image_tokens(vision.spec, images.settings, images.max_tokens)
        limits = with_images(options, limits, vision.spec, most, vision.itemsize, kv_bytes)
    cache, scheduling = size_engine(
        options, limits, kv_bytes, device.kv_share, device.default_swap_bytes(), device.default_batched_tokens
    )
    if ranks is not None:
        ranks.allocate(cache, scheduling)
    engine = _build(options, loaded, cache, scheduling, grammars, draft_model, ranks, slots, member, images)
    if tokenizer is not None and (template := options.given_chat_template) is not None:
        tokenizer.use_chat_template(template)
    ready = _ready(loaded, engine, cache, scheduling, is_static=options.batching == "static")
    if draft_model is not None:
        weights_bytes = ready.weights_bytes + draft_model.model.weight_bytes
        ready = structs.replace(ready, weights_bytes=weights_bytes, kv_bytes_per_token=limits.kv_bytes_per_token)
    inputs = InputProcessor(tokenizer, ready, options, cuts_answers=True)
    return AssembledEngine(options, engine, inputs, tokenizer, loaded, ready, ranks, member)


def _grammars(
    options: EngineOptions, loaded: LoadedModel, read_tokenizer: Callable[[], Tokenizer]
) -> ConstrainedDecoding | None:
    """Return the grammars of an engine; None for static batches."""
    if options.batching == "static":
        return None

    def tokenizer_text() -> TokenizerText:
        tokenizer = read_tokenizer()
        json = tokenizer.exact_json()
        if json is None:
            raise ModelError("the tokenizer's tokens cannot be decoded one by one, which grammars need")
        return TokenizerText(json, tokenizer.vocab_size, tokenizer.eos_token_id)

    return ConstrainedDecoding(
        tokenizer_text, loaded.model.vocab_size, loaded.eos_token_ids, jumps_forward=options.enable_jump_forward
    )


def _draft_model(
    options: EngineOptions, target: LoadedModel, folder: Path, tokenizer: Path
) -> LoadedDraftModel | None:
    """Return the draft model that the options ask for. `folder`, `tokenizer`: of the target."""
    config = options.speculation
    if config is None or config.method not in METHODS_WITH_MODELS:
        return None
    if config.method == "mtp":
        return load_mtp_head(options, config, target, folder)
    if config.method == "eagle3":
        return load_eagle_head(options, config, target)
    return load_draft_model(options, config, target, tokenizer)


def _build(
    options: EngineOptions, loaded: LoadedModel, cache: CacheConfig, scheduling: SchedulerConfig,
    grammars: ConstrainedDecoding | None, draft_model: LoadedDraftModel | None, ranks: "RankSet | None",
    slots: "TritonSlots | None", member: FleetMember | None, images: ImageInputs | str,
) -> Engine:  # fmt: skip
    """Allocate the KV cache, the batch and the swap space; return the engine over them."""
    model, device = loaded.model, loaded.device
    batch = PersistentBatch(scheduling.max_num_seqs, scheduling.max_model_len, cache.block_size, model.vocab_size)
    geometry = model.kv_geometry
    kv = device.allocate_cache(geometry, cache.num_blocks, cache.block_size, model.back_end, cache.num_state_slots)
    method: DraftModel | None = None
    if draft_model is not None:
        geometry = geometry.joined(draft_model.model.kv_geometry)
        own = draft_model.allocate_cache(cache.num_blocks, cache.block_size)
        kv, method = kv.joined(own), draft_model.drafter(own, batch)
    swapper = None
    if cache.num_swap_blocks:
        swapper = device.swapper(
            kv, geometry, cache.num_swap_blocks, model.back_end, options.swap_dir, cache.num_swap_slots
        )  # fmt: skip
    drafter = _drafter(options, batch, model, draft_model, method)
    adapters, rows = _adapters(options, model, ranks, slots)
    rows_of_images = None
    if isinstance(images, ImageInputs):
        rows_of_images = ImageRows(_vision(model, ranks), images.settings)
    compute = StepCompute(
        model, kv, batch, swapper, None if grammars is None else grammars.rows, drafter, rows, rows_of_images
    )
    executor = (device if ranks is None else ranks).executor(compute, scheduling.max_num_batched_tokens)

    def unprepared(request: Request) -> Lack | None:
        if grammars is not None and not grammars.is_compiled(request.params, request.bad_words_token_ids):
            return Lack("grammar")
        return None if adapters is None or adapters.is_ready(request) else Lack("adapter", adapters.is_held)

    if options.record is None:
        scheduler = make_scheduler(scheduling, cache, unprepared)
    else:
        scheduler = make_recorded_scheduler(options, scheduling, cache, unprepared)
    if adapters is not None:
        adapters.watch(scheduler)
    disk = None
    if options.kv_disk_dir is not None:
        disk = open_disk(options, loaded, kv, scheduler, None if draft_model is None else draft_model.model)
    peers = None
    if options.kv_role != "none" or member is not None:
        peers = open_peers(options, loaded, kv, scheduler, None if draft_model is None else draft_model.model, member)
    engine = Engine(scheduler, executor, grammars, adapters, disk=disk, peers=peers)
    engine.no_images_reason = images if isinstance(images, str) else ""
    if isinstance(images, ImageInputs):
        scheduler.planner.images = ImageEncodings(images)
        if scheduler.cache.loads is not None:
            kind = images_digest(_vision(model, ranks).spec, images.settings)
            scheduler.cache.loads.stored_keys.kind = kind
    if options.record is None:
        keep_recent_plans(engine, options, scheduling, cache)
    return engine


def _image_inputs(
    options: EngineOptions, loaded: LoadedModel, ranks: "RankSet | None", batched_tokens: int
) -> ImageInputs | str:
    """Return the images that an engine accepts, or the reason for none. ConfigError for a cache of less than one."""
    model = loaded.model if ranks is None else ranks.own_model
    spec = model.spec.vision if isinstance(model, Decoder) else None
    if spec is None:
        return TEXT_ALONE
    refused = {
        "device cuda": not isinstance(loaded.device, HostDevice),
        f"memory_policy {options.memory_policy!r}": options.memory_policy != "paged",
        "kv_events_config": options.kv_events is not None,
        "record": options.record is not None,
        f"max_num_batched_tokens {batched_tokens}, above {MAX_STEP_IMAGE_TOKENS}":
            spec.has_places and batched_tokens > MAX_STEP_IMAGE_TOKENS,
        # Ranks compare the files of the model, not that one.
        f"mmproj on {options.nnodes} machines": options.mmproj is not None and options.nnodes > 1,
        f"an encoder of {spec.num_channels} channels": spec.num_channels != NUM_CHANNELS,
    }  # fmt: skip
    for name, is_asked in refused.items():
        if is_asked:
            return f"they are not served with {name}"
    assert isinstance(model, Decoder)
    row_bytes, settings = spec.row_width * _vision(model, None).itemsize, loaded.image_settings
    if settings is None:
        return "the settings of the model's image processor cannot be used, for a reason that the log has"
    num_bytes, token_flops = parse_bytes(options.image_cache_memory, "image_cache_memory"), _token_flops(model.spec)
    is_of_one_size = spec.merging is None and spec.tiles is None
    least = spec.num_tokens if is_of_one_size else settings.least_tokens
    if num_bytes < least * row_bytes:
        raise ConfigError(
            f"image_cache_memory {options.image_cache_memory} holds no image of the model: one takes "
            f"{least * row_bytes} bytes"
        )
    max_tokens, size = int(num_bytes // row_bytes), spec.image_size
    if spec.merging is None:
        cost = math.ceil(flops(spec) / token_flops)
        if spec.tiles is not None:
            return ImageInputs(settings, 0, (spec.tiles.size, spec.tiles.size), cost, max_tokens)
        return ImageInputs(settings, spec.num_tokens, (size, size), cost, max_tokens, spec.sees_whole)
    row_flops, pair_flops = merged_flops(spec)
    return ImageInputs(
        settings, 0, (spec.unit, spec.unit), 0, max_tokens, token_cost=row_flops / token_flops,
        pair_cost=pair_flops / token_flops,
    )


def _vision(model: LanguageModel, ranks: "RankSet | None") -> VisionTower | MergingTower | TiledTower:
    """Return the encoder of a model of images, of several ranks that of rank 0."""
    own = model if ranks is None else ranks.own_model
    assert isinstance(own, Decoder)
    assert own.vision is not None, "an encoder that was not loaded"
    return own.vision


def _token_flops(spec: DecoderSpec) -> float:
    """Return the operations of a token of a prompt."""
    return 2.0 * num_layer_weights(spec)


def open_disk(
    options: EngineOptions, loaded: LoadedModel, kv: KVCache, scheduler: Scheduler,
    draft_model: LanguageModel | DraftHead | None,
) -> KVDisk:  # fmt: skip
    """Return the disk tier of an engine, with the blocks that its folder has. ConfigError where it cannot be served."""
    cache = scheduler.cache
    check_has_blocks(f"kv_disk_dir {options.kv_disk_dir!r}", cache, loaded)
    identity = kv_identity(options, loaded, kv, draft_model)
    from quire.execution.kv_store import CacheBlocks, KVStore  # noqa: PLC0415 (needs the extension)

    blocks = CacheBlocks(kv.tensors, kv.states)
    assert options.kv_disk_dir is not None, "a folder is given"
    store = KVStore.open(
        Path(options.kv_disk_dir).expanduser(), options.kv_disk_bytes // options.data_parallel_size, blocks,
        cache.block_size, identity, parse_bytes(options.kv_disk_write_rate, "kv_disk_write_rate"),
        options.data_parallel_size,
    )  # fmt: skip
    stored = StoredBlocks(store.num_slots, cache.block_size)
    stored.recover(store.recovered)
    loads = loads_of(cache, kv)
    loads.disk = DiskTier(cache, stored, store.scope_key, options.kv_disk_write_policy, blocks.parts)
    disk = KVDisk(loads, loads.disk, store)
    disk.sessions = KVSessions(disk, cache, blocks, identity)
    for other in store.others(cache.block_size) if options.data_parallel_size > 1 else ():
        stored = StoredBlocks(other.num_slots, cache.block_size)
        stored.recover(other.recovered)
        tier = DiskTier(cache, stored, other.scope_key, parts=blocks.parts)
        tier.is_written_over = True
        disk.add_other(tier, other)
    return disk


def check_has_blocks(setting: str, cache: KVCacheManager, loaded: LoadedModel) -> None:
    """Raise ConfigError for a setting that needs blocks of keys and values with an identity, where there are none."""
    if not cache.num_blocks:
        raise ConfigError(f"{setting}: the model keeps no keys and values; leave it out")
    if loaded.model.back_end.name != "cpp":
        raise ConfigError(f"{setting} needs the C++ kernels, not the back end {loaded.model.back_end.name}")


def open_peers(
    options: EngineOptions, loaded: LoadedModel, kv: KVCache, scheduler: Scheduler,
    draft_model: LanguageModel | DraftHead | None, member: FleetMember | None = None,
) -> "KVPeers":  # fmt: skip
    """Return the parts of an engine in prefill apart from decoding. ConfigError where it cannot take them.

    An engine of several behind one server has its part by its number; the first ones compute prompts.
    """
    cache = scheduler.cache
    name = f"kv_role {options.kv_role!r}" if member is None else f"prefill_engines {options.prefill_engines}"
    check_has_blocks(name, cache, loaded)
    from quire.engine.kv_consumer import KVConsumer, KVPeers, Place, read_peers  # noqa: PLC0415 (where it is used)
    from quire.engine.kv_producer import PURPOSE, KVProducer  # noqa: PLC0415
    from quire.engine.parallel.addresses import key_of, listening_address, read_secret  # noqa: PLC0415
    from quire.execution.kv_store import CacheBlocks  # noqa: PLC0415 (needs the extension)

    port, peers = options.kv_port, list[Place]()
    if member is not None:
        secret, is_producer = member.secret, member.number < options.prefill_engines
        is_consumer, port = not is_producer, port + member.number
        numbers = range(options.prefill_engines)
        peers = [Place(member_name(each), options.kv_host, options.kv_port + each) for each in numbers]
    else:
        assert options.kv_secret_file is not None, "options are checked"
        secret, is_producer = read_secret(options.kv_secret_file, "kv_secret_file"), options.is_kv_producer
        is_consumer = options.is_kv_consumer
        if is_consumer:
            assert options.kv_peers is not None, "options are checked"
            peers = read_peers(options.kv_peers)
    key = key_of(secret, PURPOSE)
    identity, loads = kv_identity(options, loaded, kv, draft_model), loads_of(cache, kv)
    consumer, producer = None, None
    if is_producer:
        address = listening_address(options)
        if member is not None and not ipaddress.ip_address(address).is_loopback:
            raise ConfigError(f"kv_host {options.kv_host} must be an address of this machine alone, with {name}")
        blocks = CacheBlocks(kv.tensors, kv.states)
        loads.tickets = Tickets(cache, options.kv_lease_duration, time.monotonic, blocks.parts)
        producer = KVProducer(loads.tickets, blocks, identity, address, port, key)
    if is_consumer:
        loads.peers = consumer = KVConsumer(
            loads, CacheBlocks(kv.tensors, kv.states), cache.block_size, identity, peers, key
        )
    return KVPeers(consumer, producer)


def loads_of(cache: KVCacheManager, kv: KVCache) -> Loads:
    """Return the loads of a cache, made at the first call."""
    if cache.loads is None:
        cache.loads = Loads(cache, sum(each.nbytes // len(each) for each in kv.tensors))
    return cache.loads


def _adapter_slots(options: EngineOptions, model: LanguageModel, ranks: "RankSet | None") -> "TritonSlots | None":
    """Return memory for adapters on the model's device; None if they are off, or computed where they are loaded."""
    if not options.enable_lora:
        return None
    if ranks is None:
        return make_slots(options, model)
    return make_slots(options, ranks.own_model, ranks.exchange.shard)


def _adapters(
    options: EngineOptions, model: LanguageModel, ranks: "RankSet | None", slots: "TritonSlots | None"
) -> tuple[AdapterStore, AdapterRows] | tuple[None, None]:
    """Return the adapters of an engine and those of its rows; None if they are off."""
    if not options.enable_lora:
        return None, None
    if ranks is None:
        store = make_store(options, model)
    else:
        store = make_store(options, ranks.own_model, ranks.exchange.shard, ranks)
    return store, AdapterRows(store.weights, slots)


def _ready(
    loaded: LoadedModel, engine: Engine, cache: CacheConfig, scheduling: SchedulerConfig, *, is_static: bool
) -> Ready:
    """Return the figures that clients of the engine need."""
    model = loaded.model
    return Ready(
        limits=engine.scheduler.limits,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        dtype=dtype_name(model.dtype),
        device=str(model.device),
        num_parameters=model.num_parameters,
        weights_bytes=model.weight_bytes,
        kv_bytes_per_token=loaded.limits.kv_bytes_per_token,
        num_swap_blocks=cache.num_swap_blocks, slot_bytes=loaded.limits.slot_bytes, sliding_window=cache.sliding_window,
        kv_cache_dtype=model.kv_geometry.quantized_dtype,
        quantization="" if loaded.quantization == UNQUANTIZED else str(loaded.quantization),
        sampling=loaded.sampling,
        pooler=None if is_static else loaded.pooler,
        no_pooler_reason="its batches are static" if is_static else loaded.no_pooler_reason,
        generates=loaded.generates,
        images=None if (images := engine.scheduler.planner.images) is None else images.inputs,
        no_images_reason=engine.no_images_reason,
    )


def _drafter(
    options: EngineOptions, batch: PersistentBatch, model: LanguageModel, draft_model: LoadedDraftModel | None,
    method: DraftModel | None,
) -> Drafter | None:  # fmt: skip
    """Return the drafter that the options ask for."""
    if options.speculation is None:
        return None
    kernels = model.back_end.name
    if kernels == "cpp":
        kernels = usable_isas()[0] if options.cpu_isa == "auto" else options.cpu_isa
    experts = expert_reads(model.spec) if isinstance(model, Decoder) else None
    bytes_per_weight = model.weight_bytes / model.num_parameters
    of_one_row: float = model.read_bytes if isinstance(model, Decoder) else model.weight_bytes
    if experts is not None:
        of_one_row = bytes_per_weight * experts.num_weights
    read = (0, 0) if draft_model is None else draft_model.pass_bytes
    draft_cost, logits_cost = (num_bytes / of_one_row for num_bytes in read)
    return make_drafter(options.speculation, batch, kernels, bytes_per_weight, method, draft_cost, experts, logits_cost)
