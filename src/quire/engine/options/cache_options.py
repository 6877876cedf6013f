"""Options of the KV cache: blocks, swap space, prefixes and preemption."""

from dataclasses import dataclass
from functools import partial

from quire.core.config import (
    DEFAULT_BLOCK_SIZE,
    KERNEL_BLOCK_SIZES,
    DiskWritePolicy,
    KVCacheDtype,
    MemoryPolicy,
    PreemptionMode,
)
from quire.core.errors import ConfigError
from quire.core.kv_events import DEFAULT_ENDPOINT, HashAlgorithm, KVEventsConfig, parse_kv_events
from quire.core.optional_package import needs_library
from quire.core.options import SIZE, option, parse_bytes

DEFAULT_KV_DISK_SIZE = "20GiB"
_cache = partial(option, panel="Cache")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CacheOptions:
    """Memory of keys and values, and what is kept in it."""

    max_model_len: int | None = _cache(
        None, "context length: longest prompt and output together, tokens", low=1,
        shown_default="the model's, cut to what the KV cache holds",
        row="longest prompt and output together, tokens; `None`: the model's, cut to what the KV cache holds. The "
        "model's is `max_position_embeddings`; with `rope_scaling` of type `linear` that times the factor, with `yarn` "
        "`original_max_position_embeddings` times the factor, with `llama3` as it is. `dynamic` provides its factor "
        "times as much, but only if asked for by this setting, since it changes all answers "
        "([decision 0014](decisions/0014-dynamic-ntk-by-the-longest-sequence.md)). At most 16,777,216. Rotary tables "
        "take 4 bytes x head size for each position that can be used",
    )  # fmt: skip
    kv_cache_dtype: KVCacheDtype = _cache(
        "auto", "of the KV cache: auto (that of the kernels), int8_per_token_head, fp8_per_token_head or fp8",
        metavar="DTYPE",
        row="of the KV cache: `auto` (that in which the kernels compute); `int8_per_token_head` or "
        "`fp8_per_token_head`, 8 bits with a scale for each token and KV head; `fp8`, 8 bits without stored scales; "
        "`float32`, `bfloat16` or `float16` is refused unless it is what `auto` means "
        "([quantization.md](quantization.md#kv-cache-in-8-bits))",
    )  # fmt: skip
    block_size: int = _cache(
        DEFAULT_BLOCK_SIZE, "tokens per KV block", low=1, row="tokens per KV block: 8, 16, 32, 64 or 128"
    )
    kv_cache_memory: int | str | None = _cache(
        None, "memory of the KV cache: bytes, or 512MiB, 4GiB", metavar=SIZE, low=1,
        shown_default="40 % of the free memory on a CPU",
        row='for the KV cache: bytes, or text such as `"512MiB"`, `"4GiB"`; `None`: 40 % of the free memory, on a GPU '
        "what `gpu_memory_utilization` leaves; never more than `max_num_seqs` full-length sequences can use",
    )  # fmt: skip
    num_kv_blocks: int | None = _cache(
        None, "exact number of KV blocks; wins over the above", low=1, shown_default="from the above",
        row="exact number of blocks; wins over `kv_cache_memory`",
    )  # fmt: skip
    num_state_slots: int | None = _cache(
        None, "exact number of slots for states of sequences, and snapshots of them", low=1,
        shown_default="two for each of max_num_seqs, at least 8, in at most half of that memory",
        row="of models that keep a state per sequence: exact number of slots, which hold the states of running "
        "sequences and snapshots for prompts that begin alike; `None`: two for each of `max_num_seqs`, at least 8, in "
        "at most half of the memory of the KV cache. n sequences run at once with n + n / 2 slots "
        "([prefix caching](prefix-caching.md#models-with-a-state))",
    )  # fmt: skip
    swap_space: int | str | None = _cache(
        None, "bytes for the blocks of preempted requests, of a file, or of host memory for a GPU; 4GiB",
        metavar=SIZE, shown_default="none on a CPU, 4GiB for a GPU",
        row="for the blocks of preempted requests: bytes, or text as above, of a file, or of pinned host memory for a "
        "GPU; 0: none; `None`: none; for a GPU the least of 4 GiB, half of the host's free memory and what all "
        "sequences can use",
    )  # fmt: skip
    num_swap_blocks: int | None = _cache(
        None, "exact number of its blocks; wins over the above", low=0, shown_default="from the above",
        row="exact number of blocks of the swap space; wins over `swap_space`. States of sequences get as many bytes "
        "more, at most a slot for each of `max_num_seqs`; of `swap_space` they get at most half",
    )  # fmt: skip
    swap_dir: str | None = _cache(
        None, "where that file is", metavar="FOLDER", shown_default="the temporary directory",
        row="folder of the swap file; `None`: the directory for temporary files. The file has no name, takes all its "
        "room at start, and is freed with the process",
    )  # fmt: skip
    kv_cache_metrics: bool = _cache(
        False, "measure how long cached KV blocks are kept and when they are used again",
        row="`True`: metrics of how long cached blocks are kept, and when they are used again "
        "([metrics.md](metrics.md#histograms))",
    )  # fmt: skip
    kv_cache_metrics_sample: float = _cache(
        0.01, "share of the blocks that are measured", low=0, is_low_excluded=True, high=1, metavar="SHARE",
        row="share of the blocks that `kv_cache_metrics` measures, above 0 and at most 1",
    )  # fmt: skip
    preemption_mode: PreemptionMode = _cache(
        "auto", "how a preempted request comes back",
        row="how a preempted request is resumed: `recompute`; `swap`, its blocks are moved out and back in; `auto`, "
        "the cheaper of the two for each request, by measured rates. Where the swap space is full, or there is none, "
        "tokens are computed again; `swap` without swap space is refused",
    )  # fmt: skip
    enable_prefix_caching: bool = _cache(
        True, "keep what has been computed, and find it again for prompts that begin alike",
        row="`True`: what has been computed is kept while there is room, and found again by prompts that begin alike",
    )  # fmt: skip
    kv_disk_dir: str | None = _cache(
        None, "keep KV blocks in this folder, also after a restart", metavar="FOLDER", shown_default="none are kept",
        row="folder in which full KV blocks are kept, and found again after a restart, too; `None`: none are. On a CPU "
        "with the C++ kernels, and `tensor_parallel_size` 1. It is made if it is not there, belongs to the process "
        "alone (0700), and holds the users' text in another form ([prefix caching](prefix-caching.md#on-a-disk))",
    )  # fmt: skip
    kv_disk_size: int | str | None = _cache(
        None, "most bytes of that folder; 20GiB", metavar=SIZE, low=1, shown_default="20GiB",
        row='most bytes of `kv_disk_dir`, shared by all engines of `data_parallel_size`: bytes, or text such as '
        '`"20GiB"`; `None`: 20 GiB. At least one block',
    )  # fmt: skip
    kv_disk_write_policy: DiskWritePolicy = _cache(
        "finished", "KV blocks that are written",
        row="blocks that are written to `kv_disk_dir`: `reused`, those that a later request has found in the cache; "
        "`finished`, also those of requests that have finished; `all`, also those of aborted ones",
    )  # fmt: skip
    kv_disk_write_rate: int | str = _cache(
        "64MiB", "most bytes written per second", metavar=SIZE, low=1,
        row="most bytes written to `kv_disk_dir` per second: blocks that find no room meanwhile are not written",
    )  # fmt: skip
    kv_events_config: str = _cache(
        "", "events of the prefix cache for routers, as JSON: enable_kv_cache_events, endpoint, ...", metavar="JSON",
        row="events of the prefix cache over ZMQ, in vLLM's form, for servers: a JSON object with "
        "`enable_kv_cache_events` (false), `publisher` (`zmq`; `null`: off), `endpoint` "
        f"(`{DEFAULT_ENDPOINT}`), `replay_endpoint` (none), `topic` (empty), `buffer_steps` (10,000), `buffer_bytes` "
        "(64 MiB), `hwm` and `max_queue_size` (100,000), `use_int_block_hashes` (true) "
        "([scaling.md](scaling.md#kv-events)). Needs `quire[events]`",
    )  # fmt: skip
    prefix_caching_hash_algo: HashAlgorithm = _cache(
        "sha256", "names of blocks in events, as vLLM computes them",
        row="how blocks are named in events, as vLLM does: `sha256` or `sha256_cbor`; `xxhash` and `xxhash_cbor` are "
        "refused with events, and have no effect without them: the cache compares tokens",
    )  # fmt: skip
    image_cache_memory: int | str = _cache(
        "256MiB", "memory of encoded images, of a model that reads images; 256MiB", metavar=SIZE, low=1,
        row='most bytes of encoded images that are kept for further prompts, of a model that reads images: bytes, or '
        'text such as `"256MiB"`. At least one image; the least recently used ones are encoded again',
    )  # fmt: skip
    memory_policy: MemoryPolicy = option(
        "paged", "how KV blocks are given out; all but paged reserve one chunk per sequence", kind="none",
        row="`paged`; or a baseline, for measurements: one contiguous chunk per sequence, by a buddy allocator, "
        "reserved at admission: `contiguous-max` (`max_model_len` tokens), `contiguous-pow2` (the prompt and the next "
        "power of two of `max_tokens`), `contiguous-oracle` (the prompt and `max_tokens`). Nothing is shared, cached "
        "or swapped; a fork, and a beam that extends another, copies. The same tokens",
    )  # fmt: skip
    max_kv_share_per_key: float = option(
        1.0, "share of the KV blocks that the requests of a key may hold", kind="none",
        low=0, is_low_excluded=True, high=1,
        row="for servers: share of the KV blocks, above 0 and at most 1, that the running requests of one client may "
        "hold; the requests of an `LLM` are of one client",
    )  # fmt: skip

    @property
    def kv_disk_bytes(self) -> int:
        """Most bytes of the disk tier of one engine and all others."""
        return parse_bytes(DEFAULT_KV_DISK_SIZE if self.kv_disk_size is None else self.kv_disk_size, "kv_disk_size")

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Settings of KV events; None: they are off. Raises ConfigError for what is not supported."""
        return parse_kv_events(self.kv_events_config, self.prefix_caching_hash_algo)

    def _check_cache(self) -> None:
        parse_bytes(self.kv_disk_write_rate, "kv_disk_write_rate")
        parse_bytes(self.image_cache_memory, "image_cache_memory")
        if self.kv_disk_dir is None and self.kv_disk_size is not None:
            raise ConfigError(f"kv_disk_size {self.kv_disk_size!r} needs kv_disk_dir")
        if self.kv_disk_dir is not None:
            self._check_disk()
        if self.kv_events is not None:
            if not self.enable_prefix_caching:
                raise ConfigError("kv_events_config tells what is in the prefix cache: it needs enable_prefix_caching")
            with needs_library("kv_events_config", "zmq", "'quire[events]'"):
                import zmq  # noqa: F401, PLC0415 (an optional package)
        if self.block_size not in KERNEL_BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {KERNEL_BLOCK_SIZES}, got {self.block_size}")
        if self.max_kv_share_per_key < 1 and self.memory_policy != "paged":
            raise ConfigError(
                f"max_kv_share_per_key {self.max_kv_share_per_key} needs memory_policy 'paged', "
                f"got {self.memory_policy!r}"
            )

    def _check_disk(self) -> None:
        if not self.kv_disk_dir:
            raise ConfigError("kv_disk_dir is empty; name a folder")
        _ = self.kv_disk_bytes
        if not self.enable_prefix_caching:
            raise ConfigError(f"kv_disk_dir {self.kv_disk_dir!r} needs enable_prefix_caching")
        if self.memory_policy != "paged":
            raise ConfigError(
                f"kv_disk_dir {self.kv_disk_dir!r} needs memory_policy 'paged', got {self.memory_policy!r}"
            )
