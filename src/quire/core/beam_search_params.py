"""BeamSearchParams: how wide and how long a beam search looks. Checked once, at construction."""

from dataclasses import dataclass

from quire.core.checks import check_bool, check_float, check_int
from quire.core.sampling_params import MAX_TEMPERATURE

MAX_LENGTH_PENALTY = 100.0  # either sign


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search; a value out of range raises `InvalidRequestError`, a `ValueError`, that names it.

    A beam's score is the sum of its logprobs / (generated tokens ** length_penalty). `temperature` divides the logits
    before the logprobs are taken; 0 leaves them as they are.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        temperature = check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        length_penalty = check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "length_penalty", length_penalty)
