"""The flags of every command that loads a model: `quire.engine.options.EngineOptions` as typer sees it.

Choices and checks are those of `EngineOptions`, so that Python and the command line take the same.
"""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import quire
from quire.cli.config_file import load_config
from quire.cli.flag_groups import flag
from quire.core.config import PreemptionMode
from quire.engine.options import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    GPU_MEMORY_UTILIZATION,
    CpuIsa,
    Device,
    Dtype,
    EngineOptions,
)

if TYPE_CHECKING:
    from quire.llm import LLM

_flag = partial(flag, panel="Engine")

_MODEL = typer.Argument(
    help="folder or hub id", show_default="the bundled demo model", metavar="MODEL", show_envvar=False
)
_CONFIG = _flag(
    "flags by name from a YAML file; before it come QUIRE_NAME in the environment and the command line",
    is_eager=True,
    callback=load_config,
    exists=True,
    dir_okay=False,
    metavar="FILE",
)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What `LLM` and the server's engine are built from."""

    model: Annotated[str | None, _MODEL] = None
    config: Annotated[Path | None, _CONFIG] = None
    dtype: Annotated[Dtype, _flag("of weights, activations and KV cache")] = "auto"
    device: Annotated[Device, _flag("where the model runs")] = "auto"
    max_model_len: Annotated[
        int | None,
        _flag("longest prompt and output, tokens", show_default="the model's, cut to what the KV cache holds"),
    ] = None
    block_size: Annotated[int, _flag("tokens per KV block")] = 16
    kv_cache_memory: Annotated[
        str | None, _flag("bytes; 512MiB, 4GiB", show_default="40 % of the free memory on a CPU", metavar="SIZE")
    ] = None
    num_kv_blocks: Annotated[
        int | None, _flag("exact number of KV blocks; wins over the above", show_default="from the above")
    ] = None
    swap_space: Annotated[
        str | None,
        _flag(
            "bytes for the blocks of preempted requests, of a file, or of host memory for a GPU; 4GiB",
            show_default="none on a CPU, 4GiB for a GPU",
            metavar="SIZE",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, _flag("share of a GPU for weights, activations and KV cache")
    ] = GPU_MEMORY_UTILIZATION
    num_swap_blocks: Annotated[
        int | None, _flag("exact number of its blocks; wins over the above", show_default="from the above")
    ] = None
    swap_dir: Annotated[
        str | None, _flag("where that file is", show_default="the temporary directory", metavar="FOLDER")
    ] = None
    max_num_seqs: Annotated[int, _flag("sequences in one step")] = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: Annotated[int, _flag("tokens in one step")] = DEFAULT_MAX_NUM_BATCHED_TOKENS
    enable_prefix_caching: Annotated[
        bool, _flag("keep what has been computed, and find it again for prompts that begin alike")
    ] = True
    preemption_mode: Annotated[PreemptionMode, _flag("how a preempted request comes back")] = "auto"
    cpu_isa: Annotated[CpuIsa, _flag("instruction set of the CPU's kernels; auto is the best there is")] = "auto"
    seed: Annotated[int, _flag("of requests that bring none")] = 0
    max_logprobs: Annotated[int, _flag("highest logprobs and prompt_logprobs of a request")] = 20

    def options(self) -> EngineOptions:
        """Return the options; nothing is loaded. ConfigError for a value that cannot work."""
        return EngineOptions(**self._values())

    def load(self, **settings: Any) -> "LLM":  # noqa: ANN401 (as `_values`)
        """Load the model, and torch with it, which is not imported before. `settings`: those without a flag here."""
        return quire.LLM(**self._values(), **settings)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}
