"""BeamSearchParams: how wide and how long a beam search looks. Checked once, at construction."""

from dataclasses import dataclass

from quire.core.checks import check_bool, check_float, check_int, check_optional_int
from quire.core.sampling_params import MAX_TEMPERATURE, SamplingParams

MAX_LENGTH_PENALTY = 10.0  # either sign; any number of tokens to this power is a float, and not 0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search; a value out of range raises `InvalidRequestError`, a `ValueError`, that names it.

    A beam's score is the sum of its logprobs / (generated tokens ** length_penalty). `temperature` divides the logits
    before the logprobs are taken; 0 leaves them as they are. `max_tokens=None` is as many as fit.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_optional_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        temperature = check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        length_penalty = check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "length_penalty", length_penalty)


def num_candidates(params: BeamSearchParams, num_eos_tokens: int) -> int:
    """Return how many of a beam's likeliest tokens can matter: those that may survive, and all that may end it.

    The best 2 x width continuations of all beams hold no more of any one beam that could be chosen.
    """
    return params.beam_width + num_eos_tokens


def as_sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return sampling parameters with the search's number of answers and lengths."""
    return SamplingParams(
        n=params.beam_width, temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos
    )
