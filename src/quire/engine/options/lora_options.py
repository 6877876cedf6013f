"""Options of LoRA adapters."""

from dataclasses import dataclass
from functools import partial

from quire.core.errors import ConfigError
from quire.core.lora import DEFAULT_MAX_LORAS, DEFAULT_MAX_RANK, MAX_ADAPTERS, MAX_RANK
from quire.core.options import option

_lora = partial(option, panel="LoRA")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LoRAOptions:
    """Adapters that requests may name, and their bounds."""

    enable_lora: bool = _lora(
        False, "serve LoRA adapters beside the model",
        row="`True`: requests may name LoRA adapters ([adapters.md](adapters.md)). With `memory_policy` "
        "`paged` and continuous batching",
    )  # fmt: skip
    max_loras: int | None = _lora(
        None, "adapters of the requests that run at once", low=1, high=MAX_ADAPTERS,
        shown_default=f"{DEFAULT_MAX_LORAS}, or max_cpu_loras if that is lower",
        row=f"different adapters of the requests that run at once; others wait; `None`: {DEFAULT_MAX_LORAS}, or "
        "`max_cpu_loras` if that is lower",
    )  # fmt: skip
    max_cpu_loras: int | None = _lora(
        None, "adapters in memory", low=1, high=MAX_ADAPTERS, shown_default="max_loras",
        row="adapters in memory, at least `max_loras`; the one not used for longest is dropped, and read again when a "
        "request names it; `None`: `max_loras`",
    )  # fmt: skip
    max_lora_rank: int = _lora(
        DEFAULT_MAX_RANK, "highest rank of an adapter", low=1, high=MAX_RANK,
        row="highest rank of an adapter, which bounds its memory",
    )  # fmt: skip

    @property
    def resolved_max_loras(self) -> int:
        """Adapters of running requests, set or by default."""
        return self.max_loras or min(DEFAULT_MAX_LORAS, self.max_cpu_loras or DEFAULT_MAX_LORAS)

    @property
    def resolved_max_cpu_loras(self) -> int:
        """Adapters in memory, set or by default."""
        return self.max_cpu_loras or self.resolved_max_loras

    def _check_adapters(self) -> None:
        if self.resolved_max_cpu_loras < self.resolved_max_loras:
            raise ConfigError(f"max_cpu_loras must be at least max_loras {self.max_loras}, got {self.max_cpu_loras}")
