"""EngineOptions: every setting of an engine under its public name, checked before anything is loaded.

A subject has a class of its own, in a module of this package, with its fields, its defaults and the checks that concern
it alone. They are not made alone, and have no constructors: an engine's options have the fields of all of them. Here is
what concerns several subjects.
"""

from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.core.options import check_options, parse_bytes
from quire.engine.options.cache_options import CacheOptions
from quire.engine.options.device_options import DeviceOptions
from quire.engine.options.model import LoRAOptions, ModelOptions
from quire.engine.options.parallel_options import ParallelOptions
from quire.engine.options.sampling_options import SamplingOptions
from quire.engine.options.scheduling_options import SchedulingOptions, SpeculationOptions
from quire.model.sharding import Mode


@dataclass(frozen=True)
class EngineOptions(  # the fields of the last class come first
    ParallelOptions, LoRAOptions, SpeculationOptions, SchedulingOptions, CacheOptions, DeviceOptions, SamplingOptions,
    ModelOptions,
):
    """Settings of an engine; None means that the engine chooses. Options of kind "none" have no flag here."""

    def __post_init__(self) -> None:
        """Check types and ranges; what depends on the model is checked when it is known."""
        check_options(self)
        self._check_model()
        self._check_sampling()
        self._check_cache()
        self._check_graphs()
        self._check_ranks()
        self._check_adapters()
        self._check_swap()
        self._check_batching()
        self._check_disk_tier()
        self._check_kv_role()
        self._check_transfer()
        self._check_histograms()
        if self.enable_sleep_mode and self.is_over_network:
            raise ConfigError(
                "enable_sleep_mode True: ranks on several machines (nnodes, distributed_executor_backend 'ray') do not "
                "sleep; each node's command would have to start them again"
            )
        if self.model_impl == "transformers" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size}: not supported for a model through transformers "
                "(model_impl)"
            )

    @property
    def max_truncated(self) -> int:
        """The most computed tokens that a sequence loses before its next step: rejected drafts, and a late last one."""
        return 1 + (0 if self.speculation is None else self.speculation.num_speculative_tokens)

    def tensor_parallel_mode_on(self, device: str) -> Mode:
        """Return the division of layers on a device, set or by default: of GPUs it is `reduce`, unless exact."""
        if self.tensor_parallel_mode != "auto":
            return self.tensor_parallel_mode
        return "gather" if device == "cpu" or self.exact else "reduce"

    def _check_batching(self) -> None:
        """Refuse what needs paging and continuous batches beside a baseline of either."""
        if self.batching == "static" and self.memory_policy != "contiguous-max":
            raise ConfigError(f"batching 'static' needs memory_policy 'contiguous-max', got {self.memory_policy!r}")
        is_baseline = (self.batching, self.memory_policy) != ("continuous", "paged")
        asked = {
            "speculative_config": self.speculation is not None, "enable_lora": self.enable_lora,
            "record": self.record is not None, "kv_events_config": self.kv_events is not None,
        }  # fmt: skip
        for name, is_asked in asked.items():
            if is_asked and is_baseline:
                raise ConfigError(
                    f"{name} needs batching 'continuous' and memory_policy 'paged', got {self.batching!r} and "
                    f"{self.memory_policy!r}"
                )

    def _check_disk_tier(self) -> None:
        """Refuse what keeps keys and values on a disk beside what it does not reach."""
        if self.kv_disk_dir is None:
            return
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                f"kv_disk_dir {self.kv_disk_dir!r} needs tensor_parallel_size 1, got {self.tensor_parallel_size}; "
                "use data_parallel_size"
            )
        if self.record is not None:
            raise ConfigError(
                f"record {self.record!r} does not go with kv_disk_dir {self.kv_disk_dir!r}: a record has no disk, and "
                "would be replayed with other plans"
            )
        if self.device == "cuda":
            raise ConfigError(f"kv_disk_dir {self.kv_disk_dir!r} is not served on device 'cuda'")

    def _check_transfer(self) -> None:
        """Refuse prefill apart from decoding beside what it does not reach."""
        if self.kv_role == "none" and not self.prefill_engines:
            return
        needed = {"tensor_parallel_size": 1, "memory_policy": "paged", "record": None, "enable_prefix_caching": True}
        name = f"prefill_engines {self.prefill_engines}"
        if self.kv_role != "none":
            name, needed = f"kv_role {self.kv_role!r}", needed | {"data_parallel_size": 1}
        for field, value in needed.items():
            if (given := getattr(self, field)) != value:
                raise ConfigError(f"{name} needs {field} {value!r}, got {given!r}")
        if self.device == "cuda":
            raise ConfigError(f"{name} is not served on device 'cuda'")

    def _check_swap(self) -> None:
        swap_bytes = 0 if self.swap_space is None else parse_bytes(self.swap_space, "swap_space", low=0)
        num_swap_blocks = swap_bytes if self.num_swap_blocks is None else self.num_swap_blocks
        has_default = self.device == "cuda" and self.swap_space is None and self.num_swap_blocks is None
        if self.preemption_mode == "swap" and num_swap_blocks == 0 and not has_default:
            raise ConfigError("preemption_mode 'swap' needs a swap space; set swap_space or num_swap_blocks above 0")
        if self.memory_policy != "paged" and num_swap_blocks > 0:
            raise ConfigError(f"memory_policy {self.memory_policy!r} does not swap; leave swap_space out")
