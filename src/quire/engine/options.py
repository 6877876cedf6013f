"""EngineOptions: every setting of an engine under its public name, checked before anything is loaded."""

import re
import sys
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from quire.core.config import KERNEL_BLOCK_SIZES, Batching, MemoryPolicy, PreemptionMode, SchedulingPolicy
from quire.core.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
CpuIsa = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "portable"]
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
GPU_MEMORY_UTILIZATION = 0.9  # of a GPU for weights, activations and KV cache; the contract's default
MAX_NUM_SEQS = 1 << 16  # every row is a place for max_model_len tokens

_CHOICES = {
    "dtype": Dtype, "device": Device, "cpu_isa": CpuIsa, "preemption_mode": PreemptionMode,
    "memory_policy": MemoryPolicy, "batching": Batching,
    "scheduling_policy": SchedulingPolicy,
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str, name: str, low: int = 1) -> int:
    """Return a number of bytes from an integer or a text such as "512MiB" or "4GiB". ConfigError names `name`."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name} must be bytes such as 512MiB or 4GiB, got {value!r}")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < low:
        raise ConfigError(f"{name} must be at least {low} bytes, got {value!r}")
    return size


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set; None means that the engine chooses. See docs/reference.md for each."""

    model: str | None = None
    _: KW_ONLY
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | str | None = None
    num_kv_blocks: int | None = None
    swap_space: int | str | None = None
    num_swap_blocks: int | None = None
    swap_dir: str | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    memory_policy: str = "paged"
    batching: str = "continuous"
    tensor_parallel_size: int = 1
    seed: int = 0
    max_logprobs: int = 20
    cpu_isa: str = "auto"
    scheduling_policy: str = "priority"
    max_kv_share_per_key: float = 1.0

    def __post_init__(self) -> None:
        """Check names, types and ranges; what depends on the model is checked when it is known."""
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.batching == "static" and self.memory_policy != "contiguous-max":
            raise ConfigError(f"batching 'static' needs memory_policy 'contiguous-max', got {self.memory_policy!r}")
        for name in ("max_model_len", "num_kv_blocks", "max_num_batched_tokens"):
            self._check_count(name, 1)
        self._check_count("num_swap_blocks", 0)
        self._check_count("max_num_seqs", 1, MAX_NUM_SEQS)
        self._check_count("max_logprobs", 0)
        self._check_count("block_size", 1)
        if self.block_size not in KERNEL_BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {KERNEL_BLOCK_SIZES}, got {self.block_size}")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be a number above 0, at most 1, got {share!r}")
        self._check_kv_share()
        self._check_swap()
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if self.tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size {self.tensor_parallel_size!r} is not supported yet, only 1")

    def _check_kv_share(self) -> None:
        share = self.max_kv_share_per_key
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"max_kv_share_per_key must be a number above 0, at most 1, got {share!r}")
        if share < 1 and self.memory_policy != "paged":
            raise ConfigError(f"max_kv_share_per_key {share} needs memory_policy 'paged', got {self.memory_policy!r}")

    def _check_swap(self) -> None:
        swap_bytes = 0 if self.swap_space is None else parse_bytes(self.swap_space, "swap_space", low=0)
        num_swap_blocks = swap_bytes if self.num_swap_blocks is None else self.num_swap_blocks
        has_default = self.device == "cuda" and self.swap_space is None and self.num_swap_blocks is None
        if self.preemption_mode == "swap" and num_swap_blocks == 0 and not has_default:
            raise ConfigError("preemption_mode 'swap' needs a swap space; set swap_space or num_swap_blocks above 0")
        if self.memory_policy != "paged" and num_swap_blocks > 0:
            raise ConfigError(f"memory_policy {self.memory_policy!r} does not swap; leave swap_space out")
        if self.swap_dir is not None and not isinstance(self.swap_dir, str):
            raise ConfigError(f"swap_dir must be a path as text, got {self.swap_dir!r}")

    def _check_count(self, name: str, low: int, high: int = sys.maxsize) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            span = f"of at least {low}" if high == sys.maxsize else f"from {low} to {high}"
            raise ConfigError(f"{name} must be an integer {span}, got {value!r}")
