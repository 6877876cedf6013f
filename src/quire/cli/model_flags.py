"""The flags of every command that loads a model: the engine's options, and how tokens are chosen.

Names, meanings, choices and checks are those of `EngineOptions` and `SamplingParams`, so that Python and the command
line take the same.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import quire
from quire.cli.flag_groups import flag_field, load_config
from quire.core.beam_search_params import BeamSearchParams, as_sampling_params
from quire.core.config import PreemptionMode, SchedulingPolicy
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
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

_engine = partial(flag_field, panel="Engine")
_sampling = partial(flag_field, panel="Sampling")
_beams = partial(flag_field, panel="Beam search")

_MODEL = typer.Argument(
    help="folder or hub id", show_default="the bundled demo model", metavar="MODEL", show_envvar=False
)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What `LLM` and the server's engine are built from."""

    model: Annotated[str | None, _MODEL] = None
    config: Path | None = _engine(
        None,
        "flags by name from a YAML file; before it come QUIRE_NAME in the environment and the command line",
        is_eager=True,
        callback=load_config,
        exists=True,
        dir_okay=False,
        metavar="FILE",
    )
    dtype: Dtype = _engine("auto", "of weights, activations and KV cache")
    device: Device = _engine("auto", "where the model runs")
    max_model_len: int | None = _engine(
        None, "longest prompt and output, tokens", show_default="the model's, cut to what the KV cache holds"
    )
    block_size: int = _engine(16, "tokens per KV block")
    kv_cache_memory: str | None = _engine(
        None, "bytes; 512MiB, 4GiB", show_default="40 % of the free memory on a CPU", metavar="SIZE"
    )
    num_kv_blocks: int | None = _engine(
        None, "exact number of KV blocks; wins over the above", show_default="from the above"
    )
    swap_space: str | None = _engine(
        None,
        "bytes for the blocks of preempted requests, of a file, or of host memory for a GPU; 4GiB",
        show_default="none on a CPU, 4GiB for a GPU",
        metavar="SIZE",
    )
    gpu_memory_utilization: float = _engine(
        GPU_MEMORY_UTILIZATION, "share of a GPU for weights, activations and KV cache"
    )
    num_swap_blocks: int | None = _engine(
        None, "exact number of its blocks; wins over the above", show_default="from the above"
    )
    swap_dir: str | None = _engine(None, "where that file is", show_default="the temporary directory", metavar="FOLDER")
    max_num_seqs: int = _engine(DEFAULT_MAX_NUM_SEQS, "sequences in one step")
    max_num_batched_tokens: int = _engine(DEFAULT_MAX_NUM_BATCHED_TOKENS, "tokens in one step")
    enable_prefix_caching: bool = _engine(
        True, "keep what has been computed, and find it again for prompts that begin alike"
    )
    preemption_mode: PreemptionMode = _engine("auto", "how a preempted request comes back")
    scheduling_policy: SchedulingPolicy = _engine(
        "priority", "order of admission: by priority, by arrival (fcfs), or by the service of each client (fair)"
    )
    cpu_isa: CpuIsa = _engine("auto", "instruction set of the CPU's kernels; auto is the best there is")
    seed: int = _engine(0, "of requests that bring none")
    max_logprobs: int = _engine(20, "highest logprobs and prompt_logprobs of a request")

    def options(self) -> EngineOptions:
        """Return the options; nothing is loaded. ConfigError for a value that cannot work."""
        return EngineOptions(**self._values())

    def load(self, **settings: Any) -> "LLM":  # noqa: ANN401 (as `_values`)
        """Load the model, and torch with it, which is not imported before. `settings`: those without a flag here."""
        return quire.LLM(**self._values(), **settings)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "config"}


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """How the tokens of one answer are chosen, and where it may stop."""

    min_tokens: int = _sampling(0, "fewest tokens of an answer")
    temperature: float = _sampling(1.0, "0 is greedy")
    top_p: float = _sampling(1.0, "keep the likeliest tokens that make up this share")
    top_k: int = _sampling(0, "keep this many of the likeliest tokens; 0 keeps all")
    min_p: float = _sampling(0.0, "keep tokens at least this likely, relative to the likeliest")
    presence_penalty: float = _sampling(0.0, "off the logit of every token that the answer has")
    frequency_penalty: float = _sampling(0.0, "off the logit, once for each time that the answer has it")
    repetition_penalty: float = _sampling(1.0, "divides the logits of known tokens; 1 is off")
    sampling_seed: int | None = _sampling(None, "of this request; without it, from --seed and the order of arrival")
    stop: list[str] = _sampling([], "text that ends an answer (repeatable)", metavar="TEXT")
    ignore_eos: bool = _sampling(False, "go on after the end-of-sequence token", "--ignore-eos")

    def params(self) -> SamplingParams:
        """Return the parameters. Raises InvalidRequestError for a value out of range."""
        values = asdict(self)
        return SamplingParams(seed=values.pop("sampling_seed"), stop=values.pop("stop") or None, **values)


@dataclass(frozen=True, slots=True)
class SamplingFlags(AnswerFlags):
    """What the `SamplingParams` of requests are built from."""

    max_tokens: int = _sampling(128, "most tokens of an answer")
    n: int = _sampling(1, "answers per prompt")
    logprobs: int | None = _sampling(None, "likeliest tokens to report at each position, in JSONL")


@dataclass(frozen=True, slots=True)
class BeamFlags:
    """A search for the likeliest answers, which takes the place of sampling."""

    beam_width: int | None = _beams(None, "search with so many beams: as many answers")
    length_penalty: float = _beams(1.0, "a beam's score is its logprob / tokens to this power")

    def search(self, params: SamplingParams) -> BeamSearchParams | None:
        """Return the search, if one is wanted. InvalidRequestError if `params` have what it cannot obey."""
        if self.beam_width is None:
            if self.length_penalty != 1.0:
                raise InvalidRequestError("length_penalty is only allowed with beam_width", param="length_penalty")
            return None
        beam = BeamSearchParams(
            self.beam_width, params.max_tokens, params.ignore_eos, params.temperature, self.length_penalty
        )
        obeyed = replace(as_sampling_params(beam), n=1)
        for name in (each.name for each in fields(params)):
            if getattr(params, name) != getattr(obeyed, name):
                raise InvalidRequestError(f"{name} is not allowed with beam_width", param=name)
        return beam
