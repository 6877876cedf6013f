"""BeamSearchParams: how wide and how long a beam search looks. Checked once, at construction."""

from dataclasses import dataclass

from quire.core.checks import check_bool, check_float, check_int, check_optional_int
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import MAX_TEMPERATURE, SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams, structured_outputs_from

MAX_LENGTH_PENALTY = 10.0  # either sign; any number of tokens to this power is a float, and not 0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search; a value out of range raises `InvalidRequestError`, a `ValueError`, that names it.

    A beam's score is the sum of its logprobs / (generated tokens ** length_penalty). `temperature` divides the logits
    before the logprobs are taken; 0 leaves them as they are. `max_tokens=None` is as many as fit. With
    `structured_outputs` a beam has continuations that its grammar allows alone, with the logprobs that they have among
    all tokens; a beam whose output is complete ends with an end-of-sequence token.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_optional_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        temperature = check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        length_penalty = check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "length_penalty", length_penalty)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", structured_outputs_from(self.structured_outputs))
            if self.ignore_eos:
                reason = "beams with a complete output end by an end-of-sequence token"
                raise InvalidRequestError(
                    f"ignore_eos must be False in a beam search with structured_outputs: {reason}", param="ignore_eos"
                )


def num_candidates(params: BeamSearchParams, num_eos_tokens: int) -> int:
    """Return how many of a beam's likeliest tokens can matter: those that may survive, and all that may end it.

    The best 2 x width continuations of all beams hold no more of any one beam that could be chosen.
    """
    return params.beam_width + num_eos_tokens


def as_sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return sampling parameters with the search's number of answers and lengths."""
    return SamplingParams(
        n=params.beam_width, temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
        structured_outputs=params.structured_outputs,
    )  # fmt: skip
