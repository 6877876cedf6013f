"""The options that choose tokens; names and meanings are `SamplingParams`', which also checks the values."""

from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Annotated

from quire.cli.flag_groups import flag
from quire.core.beam_search_params import BeamSearchParams, as_sampling_params
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams

_flag = partial(flag, panel="Sampling")


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """How the tokens of one answer are chosen, and where it may stop."""

    min_tokens: Annotated[int, _flag("fewest tokens of an answer")] = 0
    temperature: Annotated[float, _flag("0 is greedy")] = 1.0
    top_p: Annotated[float, _flag("keep the likeliest tokens that make up this share")] = 1.0
    top_k: Annotated[int, _flag("keep this many of the likeliest tokens; 0 keeps all")] = 0
    min_p: Annotated[float, _flag("keep tokens at least this likely, relative to the likeliest")] = 0.0
    presence_penalty: Annotated[float, _flag("off the logit of every token that the answer has")] = 0.0
    frequency_penalty: Annotated[float, _flag("off the logit, once for each time that the answer has it")] = 0.0
    repetition_penalty: Annotated[float, _flag("divides the logits of known tokens; 1 is off")] = 1.0
    sampling_seed: Annotated[
        int | None, _flag("of this request; without it, from --seed and the order of arrival")
    ] = None
    stop: Annotated[list[str], _flag("text that ends an answer (repeatable)", metavar="TEXT")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _flag("go on after the end-of-sequence token", "--ignore-eos")] = False

    def params(self) -> SamplingParams:
        """Return the parameters. Raises InvalidRequestError for a value out of range."""
        values = asdict(self)
        return SamplingParams(seed=values.pop("sampling_seed"), stop=values.pop("stop") or None, **values)


@dataclass(frozen=True, slots=True)
class SamplingFlags(AnswerFlags):
    """What the `SamplingParams` of requests are built from."""

    max_tokens: Annotated[int, _flag("most tokens of an answer")] = 128
    n: Annotated[int, _flag("answers per prompt")] = 1
    logprobs: Annotated[int | None, _flag("likeliest tokens to report at each position, in JSONL")] = None


@dataclass(frozen=True, slots=True)
class BeamFlags:
    """A search for the likeliest answers, which takes the place of sampling."""

    beam_width: Annotated[int | None, flag("search with so many beams: as many answers", panel="Beam search")] = None
    length_penalty: Annotated[
        float, flag("a beam's score is its logprob / tokens to this power", panel="Beam search")
    ] = 1.0

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
