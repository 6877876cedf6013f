"""Sizes of an engine: KV blocks, swap blocks and the longest sequence, by options, model and free memory."""

import logging
from dataclasses import dataclass, replace

from quire.cache.states import most_slots
from quire.core.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.core.host_limits import HOST_KV_SHARE
from quire.core.image_processing import MAX_PATCHES, ImageSettings
from quire.core.images import MAX_KEPT_BYTES
from quire.core.options import parse_bytes
from quire.engine.options import EngineOptions
from quire.model.config import activation_bytes
from quire.model.spec import VisionSpec
from quire.scheduling.limits import AdmissionLimits

log = logging.getLogger(__name__)

MIN_STATE_SLOTS = 8
PIXEL_BYTES = 2 * MAX_KEPT_BYTES  # pixels for later requests: an engine's, and its server's


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Figures of a model that size its engine."""

    max_position_embeddings: int
    kv_bytes_per_token: int
    sliding_window: int | None
    table_bytes_per_position: int = 0     # bytes of rotary tables
    default_positions: int | None = None  # the longest sequence unless max_model_len is set; None: the first field
    scratch_bytes: int = 0                # outside of the pool: keys and values of a draft model, images
    positions_reason: str = ""            # for `max_position_embeddings`, if they are not the model's own limit
    has_tails: bool = False               # as in `KVGeometry`
    slot_bytes: int = 0                   # states of a sequence at one place; 0: the model keeps none
    num_swap_shares: int = 1              # GPUs that divide the host's swap space, each with `kv_bytes_per_token`


def with_images(
    options: EngineOptions, limits: ModelLimits, vision: VisionSpec, most_tokens: int, itemsize: int, free_bytes: int
) -> ModelLimits:
    """Return limits that leave memory for kept encodings and pixels, and for encoding an image of `most_tokens`.

    itemsize: of the encoder's dtype. ConfigError if nothing is left beside them.
    """
    num_kept = parse_bytes(options.image_cache_memory, "image_cache_memory")
    num_active, num_engines = activation_bytes(vision, most_tokens, itemsize), options.data_parallel_size
    num_ranks = options.tensor_parallel_size // options.nnodes  # each encodes by itself
    scratch_bytes = limits.scratch_bytes + num_ranks * (num_kept + num_active) + PIXEL_BYTES
    if num_engines * scratch_bytes >= free_bytes:
        num_times = num_engines * num_ranks
        cause = "max_pixels (mm_processor_kwargs) or " if vision.has_places else ""
        raise ConfigError(
            f"an image of {most_tokens} tokens takes {num_active} bytes while it is encoded, and image_cache_memory "
            f"{num_kept}{'' if num_times == 1 else f', {num_times} times (engines and ranks)'}, and kept pixels "
            f"{PIXEL_BYTES} for each engine, but {free_bytes} are free; lower {cause}image_cache_memory"
        )
    return replace(limits, scratch_bytes=scratch_bytes)


def most_image_tokens(vision: VisionSpec, settings: ImageSettings | None, max_tokens: int) -> int:
    """Return the most placeholders of an image that a client can send; `max_tokens`: what the encoder cache holds.

    settings: of the model's processor; None: they are not known.
    """
    if settings is not None:
        return min(max_tokens, settings.most_tokens)
    is_of_one_size = vision.merging is None and vision.tiles is None
    return vision.num_tokens if is_of_one_size else min(max_tokens, MAX_PATCHES // vision.pool**2)


def table_positions(
    options: EngineOptions, limits: ModelLimits, free_bytes: int, share: float = HOST_KV_SHARE
) -> int:
    """Return the number of positions that need tables, by the free bytes before the weights are loaded.

    That is max_model_len; by default the positions of the model or, if fewer, the capacity of the KV cache in tokens.
    Raises ConfigError if max_model_len is beyond the model, or if its tables do not fit into the memory.
    """
    longest = _longest(options, limits)
    if options.max_model_len is None and limits.kv_bytes_per_token:
        num_blocks, memory_bytes = -(-longest // options.block_size), int(free_bytes * share)
        num_blocks = _num_blocks(options, limits, memory_bytes // options.data_parallel_size, num_blocks)[0]
        return min(longest, num_blocks * options.block_size)
    if longest * limits.table_bytes_per_position > free_bytes:
        raise ConfigError(
            f"max_model_len is {longest}, for which tables of rotary positions take "
            f"{longest * limits.table_bytes_per_position} bytes, but {free_bytes} are free; lower max_model_len to at "
            f"most {free_bytes // limits.table_bytes_per_position}"
        )
    return longest


def _longest(options: EngineOptions, limits: ModelLimits) -> int:
    """Return max_model_len, or the model's default. ConfigError if it is beyond the model's positions."""
    if options.max_model_len is not None and options.max_model_len > limits.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model has only "
            f"{limits.max_position_embeddings} positions; set it to that or less"
            + (f" ({limits.positions_reason})" if limits.positions_reason else "")
        )
    if options.max_model_len is None and limits.positions_reason:
        log.info("max_model_len is at most %d: %s", limits.max_position_embeddings, limits.positions_reason)
    return options.max_model_len or limits.default_positions or limits.max_position_embeddings


def size_engine(
    options: EngineOptions,
    limits: ModelLimits,
    free_bytes: int,
    share: float = HOST_KV_SHARE,
    default_swap_bytes: int = 0,
    default_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
) -> tuple[CacheConfig, SchedulerConfig]:
    """Return the cache and scheduler configuration. ConfigError names the setting and a value that works.

    The KV cache takes `share` of the free bytes by default. A model that keeps no keys and values has none.
    """
    if limits.kv_bytes_per_token == 0:
        return _without_cache(options, limits, default_batched_tokens)
    num_engines = options.data_parallel_size
    shared_bytes = max(0, free_bytes - num_engines * limits.scratch_bytes)  # each engine has scratch of its own
    free_bytes = max(0, free_bytes - limits.scratch_bytes)
    longest = _longest(options, limits)
    max_num_seqs = options.resolved_max_num_seqs
    most_blocks = max_num_seqs * -(-longest // options.block_size)  # what max_num_seqs sequences can use
    num_blocks, num_slots = _num_blocks(options, limits, int(shared_bytes * share) // num_engines, most_blocks)
    block_bytes = _block_bytes(options, limits)
    if options.kv_cache_memory is not None and options.num_kv_blocks is None and num_blocks == most_blocks:
        log.info(
            "of kv_cache_memory %s the KV cache takes %d bytes: %d sequences (max_num_seqs) of %d tokens use no more",
            options.kv_cache_memory, num_engines * num_blocks * block_bytes, max_num_seqs, longest,
        )  # fmt: skip
    beside_slots = free_bytes - num_slots * limits.slot_bytes
    if options.num_state_slots is not None and beside_slots < block_bytes <= free_bytes:
        raise ConfigError(
            f"num_state_slots is {options.num_state_slots}, but slots of {limits.slot_bytes} bytes leave no room for a "
            f"KV block of {block_bytes} bytes in the {free_bytes} that are free; lower it to at most "
            f"{num_engines * ((free_bytes - block_bytes) // limits.slot_bytes)}"
        )
    if num_blocks * block_bytes > beside_slots:
        raise ConfigError(
            f"{num_blocks} KV blocks of {options.block_size} tokens take {num_blocks * block_bytes} bytes, but "
            f"{max(0, beside_slots)} are free{_beside_slots(num_slots, limits)}; lower num_kv_blocks to at most "
            f"{max(0, beside_slots // block_bytes)} or kv_cache_memory to at most {free_bytes}, or leave both to "
            "the engine"
        )
    if num_slots and most_slots(max_num_seqs) > num_slots:
        log.info("%d slots for states: of max_num_seqs %d, sequences wait for one", num_slots, max_num_seqs)
    in_a_row = num_blocks if options.memory_policy == "paged" else 1 << num_blocks.bit_length() - 1
    capacity = in_a_row * options.block_size
    if options.max_model_len is not None and options.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the KV cache holds {capacity} tokens ({in_a_row} blocks "
            f"of {options.block_size}); lower max_model_len to {capacity} or raise kv_cache_memory or num_kv_blocks to "
            f"{-(-options.max_model_len // options.block_size)} blocks"
        )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.batched_tokens(default_batched_tokens),
        max_model_len=min(longest, capacity),
        preemption_mode=options.preemption_mode,
        batching=options.batching,
        scheduling_policy=options.scheduling_policy,
        max_kv_share=options.max_kv_share_per_key,
        itl_target_s=options.itl_target_s,
        ttft_target_s=options.ttft_target_s,
    )
    default_swap_bytes = min(default_swap_bytes // limits.num_swap_shares, most_blocks * block_bytes)
    num_swap_blocks, num_swap_slots = _num_swap_blocks(options, limits, default_swap_bytes)
    cache = CacheConfig(
        num_blocks,
        options.block_size,
        limits.sliding_window,
        enable_prefix_caching=options.enable_prefix_caching,
        num_swap_blocks=num_swap_blocks,
        memory_policy=options.memory_policy,
        kv_events=options.kv_events,
        measured_share=options.kv_cache_metrics_sample if options.kv_cache_metrics else 0.0,
        finds_whole_blocks=limits.has_tails or num_slots > 0,
        num_state_slots=num_slots,
        num_swap_slots=num_swap_slots,
    )
    return cache, scheduler


def same_sizes(options: EngineOptions, limits: AdmissionLimits, num_swap_blocks: int) -> EngineOptions:
    """Return the options of an engine that takes the place of one with these limits: other memory is free now."""
    if not limits.num_blocks:
        return options      # a model without a KV cache
    num_engines = options.data_parallel_size
    return replace(
        options, num_kv_blocks=limits.num_blocks * num_engines, num_swap_blocks=num_swap_blocks * num_engines,
        num_state_slots=limits.num_state_slots * num_engines or None,
    )  # fmt: skip


def _without_cache(
    options: EngineOptions, limits: ModelLimits, default_batched_tokens: int
) -> tuple[CacheConfig, SchedulerConfig]:
    """Return the configuration of an engine without a KV cache: prompts are computed as a whole.

    The token budget is at least the longest prompt; one that is set is its limit, unless that is set as well.
    """
    for name in ("num_kv_blocks", "kv_cache_memory", "num_swap_blocks", "swap_space", "num_state_slots"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{name} is set, but the model keeps no keys and values")
    longest, budget = _longest(options, limits), options.max_num_batched_tokens
    if budget is None:
        budget = max(default_batched_tokens, longest)
    elif options.max_model_len is None:
        longest = min(longest, budget)
    scheduler = SchedulerConfig(
        max_num_seqs=options.resolved_max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        scheduling_policy=options.scheduling_policy,
        chunks_prompts=False,
    )
    if options.kv_events is not None:
        raise ConfigError("kv_events_config: the model keeps no keys and values, so there is no prefix cache")
    return CacheConfig(0, options.block_size, enable_prefix_caching=False, has_blocks=False), scheduler


def _beside_slots(num_slots: int, limits: ModelLimits) -> str:
    return f" beside {num_slots} slots for states of {limits.slot_bytes} bytes (num_state_slots)" if num_slots else ""


def _num_slots(options: EngineOptions, limits: ModelLimits, memory_bytes: int) -> int:
    """Return num_state_slots if it is set, else two for each sequence, as far as half of the memory has room.

    And at least MIN_STATE_SLOTS in that memory: a sequence alone needs room for snapshots of its prompt, of its answer,
    and of what other prompts have in common with it.
    """
    num_engines = options.data_parallel_size
    if not limits.slot_bytes:
        if options.num_state_slots is not None:
            raise ConfigError(f"num_state_slots is {options.num_state_slots}, but the model keeps no states")
        return 0
    if options.num_state_slots is not None:
        if options.num_state_slots < num_engines:
            raise ConfigError(
                f"num_state_slots is {options.num_state_slots}, but each of {num_engines} engines "
                "(data_parallel_size) needs one"
            )
        return options.num_state_slots // num_engines
    num_slots = min(max(2 * options.resolved_max_num_seqs, MIN_STATE_SLOTS), memory_bytes // 2 // limits.slot_bytes)
    if num_slots < 1:
        raise ConfigError(
            f"half of the {memory_bytes} bytes of the KV cache holds no state of a sequence, which takes "
            f"{limits.slot_bytes}; raise kv_cache_memory to at least {2 * num_engines * limits.slot_bytes}"
        )
    return num_slots


def _num_blocks(
    options: EngineOptions, limits: ModelLimits, memory_bytes: int, most_blocks: int
) -> tuple[int, int]:
    """Return num_kv_blocks if it is set, else as many as fit into the memory, at most `most_blocks`; and the slots.

    Settings are of the machine, `memory_bytes` and the results of one of its engines.
    """
    num_engines = options.data_parallel_size
    if options.kv_cache_memory is not None:
        memory_bytes = parse_bytes(options.kv_cache_memory, "kv_cache_memory") // num_engines
    num_slots = _num_slots(options, limits, memory_bytes)
    if options.num_kv_blocks is not None:
        if options.num_kv_blocks < num_engines:
            raise ConfigError(
                f"num_kv_blocks is {options.num_kv_blocks}, but each of {num_engines} engines (data_parallel_size) "
                "needs one"
            )
        return options.num_kv_blocks // num_engines, num_slots
    block_bytes = _block_bytes(options, limits)
    num_blocks = min((memory_bytes - num_slots * limits.slot_bytes) // block_bytes, most_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory of {memory_bytes} bytes holds no KV block{_beside_slots(num_slots, limits)}; one block "
            f"of {options.block_size} tokens takes {block_bytes} bytes"
        )
    return num_blocks, num_slots


def _num_swap_blocks(options: EngineOptions, limits: ModelLimits, default_bytes: int) -> tuple[int, int]:
    """Return num_swap_blocks if it is set, else as many as fit into a share of swap_space, or into its default.

    And the slots for states, one for each sequence, in as many bytes more as the blocks take that are set, or in half
    of the space. Only blocks of the paged policy are swapped by default.
    """
    num_shares, block_bytes = options.data_parallel_size * limits.num_swap_shares, _block_bytes(options, limits)
    if options.num_swap_blocks is not None:
        num_blocks = options.num_swap_blocks // options.data_parallel_size
        return num_blocks, _num_swap_slots(options, limits, num_blocks * block_bytes, "num_swap_blocks")
    if options.swap_space is None:
        return default_bytes // block_bytes if options.memory_policy == "paged" else 0, 0
    swap_bytes = parse_bytes(options.swap_space, "swap_space", low=0) // num_shares
    num_slots = _num_swap_slots(options, limits, swap_bytes // 2, "swap_space")
    swap_bytes -= num_slots * limits.slot_bytes
    if 0 < swap_bytes < block_bytes:
        raise ConfigError(
            f"swap_space of {swap_bytes} bytes holds no KV block; one block of {options.block_size} tokens takes "
            f"{block_bytes} bytes"
        )
    return swap_bytes // block_bytes, num_slots


def _num_swap_slots(options: EngineOptions, limits: ModelLimits, memory_bytes: int, setting: str) -> int:
    """Return the slots for states in a swap space, one for each sequence, as far as the memory has room.

    ConfigError where it has room for none, but all preempted requests are to be swapped.
    """
    if not limits.slot_bytes or not memory_bytes:
        return 0
    num_slots, most = memory_bytes // limits.slot_bytes, options.resolved_max_num_seqs
    if not num_slots and options.preemption_mode == "swap":
        raise ConfigError(
            f"preemption_mode 'swap' needs room for a state of {limits.slot_bytes} bytes, but {setting} "
            f"{getattr(options, setting)} gives {memory_bytes} to states, as many as to blocks; raise it to at least "
            f"{-(-limits.slot_bytes // memory_bytes)} times as much"
        )
    if num_slots < most:
        log.info(
            "%d slots of %d bytes for states of preempted requests, beside as many bytes of blocks (%s); those for "
            "which there is none are computed again", num_slots, limits.slot_bytes, setting,
        )  # fmt: skip
    return min(num_slots, most)


def _block_bytes(options: EngineOptions, limits: ModelLimits) -> int:
    return options.block_size * limits.kv_bytes_per_token
