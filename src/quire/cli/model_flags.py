"""Loading of a model for a command, and the flags of sampling and beam search.

Names, meanings and checks of the flags are those of `SamplingParams` and `BeamSearchParams`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import quire
from quire.cli.flag_groups import flag_field
from quire.core.errors import InvalidRequestError
from quire.core.options import same_option
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.engine.options import EngineOptions

if TYPE_CHECKING:
    from quire.llm import LLM

_DEFAULT = SamplingParams()
_DEFAULT_BEAM = BeamSearchParams(beam_width=1, max_tokens=None)
_sampling = partial(flag_field, panel="Sampling")
_beams = partial(flag_field, panel="Beam search")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions(EngineOptions):
    """Settings of an engine for a batch: no stream is read, so steps have no target of time by default."""

    itl_target_ms: float | str | None = same_option(EngineOptions, "itl_target_ms", flag_default="none")


def load(engine: EngineOptions) -> "LLM":
    """Load the model, and what computes with it, which is not imported before."""
    return quire.LLM(**asdict(engine))


def model_defaults(engine: EngineOptions) -> dict[str, Any]:
    """Return the parameters that generation_config names, without loading the model. ModelError as `load`."""
    from quire.engine.requests.generation_config import sampling_defaults  # noqa: PLC0415 (for commands that load a model)
    from quire.model.resolve import resolve_model  # noqa: PLC0415

    return dict(sampling_defaults(engine, resolve_model(engine.model, engine.model_files, engine.revision)).params)


def _by_model(name: str, help_text: str, fallback: object = None) -> Any:  # noqa: ANN401 (stands for the field's value)
    """Return the field of a parameter that a model's generation_config may set; None: what it says."""
    shown = getattr(_DEFAULT, name) if fallback is None else fallback
    return _sampling(None, help_text, show_default=f"the model's, else {shown:g}")


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """Sampling and stop conditions of one answer. `fallbacks`: values where no flag and no model sets one."""

    fallbacks: ClassVar[Mapping[str, Any]] = {}

    min_tokens: int = _sampling(_DEFAULT.min_tokens, "fewest tokens of an answer")
    temperature: float | None = _by_model("temperature", "0 is greedy")
    top_p: float | None = _by_model("top_p", "keep the likeliest tokens that make up this share")
    top_k: int | None = _by_model("top_k", "keep this many of the likeliest tokens; 0 keeps all")
    min_p: float | None = _by_model("min_p", "keep tokens at least this likely, relative to the likeliest")
    presence_penalty: float | None = _by_model(
        "presence_penalty", "off the logit of every token that the answer has"
    )
    frequency_penalty: float | None = _by_model(
        "frequency_penalty", "off the logit, once for each time that the answer has it"
    )
    repetition_penalty: float | None = _by_model("repetition_penalty", "divides the logits of known tokens; 1 is off")
    sampling_seed: int | None = _sampling(None, "of this request; without it, from --seed and the order of arrival")
    stop: list[str] = _sampling([], "text that ends an answer (repeatable)", metavar="TEXT")
    ignore_eos: bool = _sampling(_DEFAULT.ignore_eos, "go on after the end-of-sequence token")

    def sets(self, name: str) -> bool:
        """Return whether a flag was given for a parameter that a model may set, too."""
        return getattr(self, name, None) is not None

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return the parameters; `defaults` are the model's. Raises InvalidRequestError for a value out of range."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given |= {"seed": given.pop("sampling_seed", None), "stop": given.pop("stop") or None}
        return SamplingParams(**{**self.fallbacks, **(defaults or {}), **given})


@dataclass(frozen=True, slots=True)
class SamplingFlags(AnswerFlags):
    """Flags of the `SamplingParams` of requests."""

    fallbacks: ClassVar[Mapping[str, Any]] = {"max_tokens": 128}

    max_tokens: int | None = _by_model("max_tokens", "most tokens of an answer", fallback=128)
    n: int = _sampling(_DEFAULT.n, "answers per prompt")
    logprobs: int | None = _sampling(None, "likeliest tokens to report at each position, in JSONL")


@dataclass(frozen=True, slots=True)
class BeamFlags:
    """A search for the likeliest answers, which takes the place of sampling."""

    beam_width: int | None = _beams(None, "search with so many beams: as many answers")
    length_penalty: float = _beams(_DEFAULT_BEAM.length_penalty, "a beam's score is its logprob / tokens to this power")

    def search(self, params: SamplingParams) -> BeamSearchParams | None:
        """Return the search, if one is wanted. InvalidRequestError if `params` have what it cannot obey."""
        if self.beam_width is None:
            if self.length_penalty != _DEFAULT_BEAM.length_penalty:
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
