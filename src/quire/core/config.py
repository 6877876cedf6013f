"""Configurations: one small frozen record per layer, resolved at start and never changed after. No torch.

`int8_per_token_head` and `fp8_per_token_head` (e4m3) keep a float32 scale for each token and KV head behind its
elements; `fp8` has one scale for a layer's keys and one for its values, which no block stores.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.core.errors import ConfigError
from quire.core.kv_events import KVEventsConfig

PreemptionKind = Literal["recompute", "swap"]          # how a preempted request resumes
PreemptionMode = Literal["auto", "recompute", "swap"]  # auto: the cheaper of the two
MemoryPolicy = Literal["paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"]
SchedulingPolicy = Literal["priority", "fcfs", "fair"]  # order of admission: see quire.scheduling.waiting_lines
DiskWritePolicy = Literal["reused", "finished", "all"]  # blocks that are written to a disk
Batching = Literal["continuous", "static"]             # whether requests join and leave between steps, or all at once

DEFAULT_BLOCK_SIZE = 16                 # tokens
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
LARGE_CARD_BYTES, LARGE_CARD_BATCHED_TOKENS = 70 << 30, 8192
KERNEL_BLOCK_SIZES = (8, 16, 32, 64, 128)  # tokens; cache and scheduler by themselves take any size from 1 up


def batched_tokens_of_card(memory_bytes: float, name: str) -> int:
    """Return the default token budget of a step on a GPU: 8,192 on one of 70 GiB or more, but an A100, else 2,048.

    The table of vLLM 0.33 for its server (`EngineArgs.get_batch_defaults`), where larger steps were slower on an A100.
    """
    is_large = memory_bytes >= LARGE_CARD_BYTES and "a100" not in name.lower()
    return LARGE_CARD_BATCHED_TOKENS if is_large else DEFAULT_MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: how many blocks, of how many tokens.

    `sliding_window`: tokens that a query may look back on, itself included, if every layer has such a window (the
    widest one); None when some layer looks back on everything. `enable_prefix_caching`: what sequences have computed is
    kept while there is room, and found again by those that begin alike. `num_swap_blocks`: places outside of the cache,
    of the same size, for the blocks of preempted requests. `memory_policy`: how blocks are given out; those but `paged`
    are what paging is compared with, in chunks of a sequence, and neither cache prefixes nor swap.
    `has_blocks`: False for a model that keeps no keys and values; there are 0 blocks then. `kv_events`: None, what can
    be found is not told. `measured_share`: share of the blocks of which lifetimes are measured. `finds_whole_blocks`:
    no match goes on inside of a block, for what a block keeps of its last tokens holds at its end alone.
    `num_state_slots`: slots for the states of sequences, and for snapshots of them; 0: the model keeps no states.
    `num_swap_slots`: the same outside of the cache, for those of preempted requests.
    """

    num_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    sliding_window: int | None = None
    enable_prefix_caching: bool = True
    num_swap_blocks: int = 0
    memory_policy: MemoryPolicy = "paged"
    has_blocks: bool = True
    kv_events: KVEventsConfig | None = None
    measured_share: float = 0.0
    finds_whole_blocks: bool = False
    num_state_slots: int = 0
    num_swap_slots: int = 0

    def __post_init__(self) -> None:
        if self.has_blocks and self.num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, got {self.num_blocks}")
        if not self.has_blocks and self.num_blocks != 0:
            raise ConfigError(f"num_kv_blocks must be 0 for a model without keys and values, got {self.num_blocks}")
        if self.num_swap_blocks < 0:
            raise ConfigError(f"num_swap_blocks must be at least 0, got {self.num_swap_blocks}")
        if self.num_state_slots < 0 or self.num_swap_slots < 0:
            raise ConfigError(f"slots of states must be at least 0, got {self.num_state_slots}, {self.num_swap_slots}")
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and the longest sequence."""

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS                      # rows of the worker: sequences that run at once
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS  # the token budget of a step
    max_model_len: int = 2048              # prompt and output together, tokens
    preemption_mode: PreemptionMode = "auto"
    batching: Batching = "continuous"
    scheduling_policy: SchedulingPolicy = "priority"
    max_kv_share: float = 1.0              # most KV blocks of one client's running requests
    chunks_prompts: bool = True            # False: a step has all of a prompt or nothing of it
    itl_target_s: float = math.inf         # longest time planned for a step with a decode
    ttft_target_s: float = math.inf        # from arrival to the first token, where prompts can be hurried to meet it

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.chunks_prompts and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but prompts of up to {self.max_model_len} "
                "tokens (max_model_len) are computed in one step each"
            )
        for name in ("itl_target_s", "ttft_target_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.max_kv_share <= 1:
            raise ConfigError(f"max_kv_share must be above 0 and at most 1, got {self.max_kv_share}")


KVCacheDtype = Literal[
    "auto", "float32", "bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "fp8"
]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


LATENT_SCALE_DIMS = 128  # dimensions of a latent that share a scale of a token


class KVDtype(NamedTuple):
    """Dtype of the stored elements, and of the scales of a token under a KV head; names are torch's.

    A key, and a value, has one scale. A latent has one for each LATENT_SCALE_DIMS dimensions, and then the dimensions
    beside it that are rotated are stored in bfloat16.
    """

    element: str
    scale: str | None = None  # None: no scales

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a token's elements under one head."""
        return 0 if self.scale is None else ELEMENT_BYTES[self.scale]

    def extra_bytes(self, head_dim: int, latent_dim: int) -> int:
        """Return the bytes of a token's elements under one head beyond one element for each dimension.

        `latent_dim`: the dimensions that are a latent; 0: the head is a key or a value.
        """
        if self.scale is None or not latent_dim:
            return self.scale_bytes
        return -(-latent_dim // LATENT_SCALE_DIMS) * self.scale_bytes + head_dim - latent_dim


QUANTIZED = {
    "int8_per_token_head": KVDtype("int8", "float32"),
    "fp8_per_token_head": KVDtype("float8_e4m3fn", "float32"),
    "fp8": KVDtype("float8_e4m3fn"),
}


def kv_dtype(name: str) -> KVDtype:
    """Return the storage of a name of --kv-cache-dtype other than auto."""
    return QUANTIZED.get(name) or KVDtype(name)
