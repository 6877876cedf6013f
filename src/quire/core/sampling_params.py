"""Sampling and beam search parameters: how the tokens of one request are chosen, and when it stops.

Names and defaults are vLLM's. An instance may be changed; a request is made from a copy that was checked again
(`InputProcessor.check_params`). Every value that gets past the checks can be served by any model, except that
token ids still have to lie in the model's vocabulary (`check_vocabulary`). What the values do to the logits, and in
which order, is described in `quire.decoding.sampler`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from quire.core.checks import (
    MAX_INT,
    check_bool,
    check_float,
    check_int,
    check_optional_int,
    check_strings,
    check_token_ids,
    refuse,
    shown,
    suggest_names,
)
from quire.core.errors import InvalidRequestError
from quire.core.logprob_table import check_token_rows
from quire.core.structured_outputs import StructuredOutputsParams, structured_outputs_from

MAX_PATTERN_SIZE = 256  # each size costs some 50 ns per token


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Sizes of patterns, in tokens, and the repetitions in a row that end an output. InvalidRequestError names a field.

    `max_pattern_size` 0 is off. `min_pattern_size` 0 is 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        most = check_int("repetition_detection.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        check_int("repetition_detection.min_pattern_size", self.min_pattern_size, 0, most)
        check_int("repetition_detection.min_count", self.min_count, 2 if most else 0)


def repetition_detection_from(value: object) -> RepetitionDetectionParams | None:
    """Return parameters that were given as such or as a mapping of their fields; None for those that are off."""
    if isinstance(value, Mapping):
        known = [field.name for field in fields(RepetitionDetectionParams)]
        for name in value:
            if name not in known:
                message = f"repetition_detection has no field {shown(name)}; its fields are {', '.join(known)}"
                raise InvalidRequestError(message, param="repetition_detection")
        value = RepetitionDetectionParams(**value)
    if not isinstance(value, RepetitionDetectionParams):
        refuse("repetition_detection", value, "RepetitionDetectionParams or a mapping of its fields")
    return value if value.max_pattern_size else None


class RepetitionDetector:
    """Detector of repetitions at the end of a growing output, in a time per token that its length does not change."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._num_more = params.min_count - 1   # repetitions behind the first
        self._num_equal = [0] * len(self._sizes)  # last tokens that equal those one pattern before, by size

    def append(self, output: list[int], token: int) -> bool:
        """Return whether `token`, appended to `output`, completes `min_count` repetitions of a pattern in a row."""
        found = False
        for index, size in enumerate(self._sizes):
            if size > len(output):
                break
            is_equal = output[-size] == token
            self._num_equal[index] = self._num_equal[index] + 1 if is_equal else 0
            found |= self._num_equal[index] >= size * self._num_more
        return found


NUM_SEEDS = 1 << 64  # draws are made with seeds modulo this
_MASK_64 = NUM_SEEDS - 1


def _mix64(value: int) -> int:
    """Scramble 64 bits so that near inputs give unrelated outputs (the finalizer of SplitMix64; Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def branch_seed(seed: int, branch: int) -> int:
    """Return the seed of branch `branch` of a request with seed `seed`: for branches above 0 below NUM_SEEDS.

    Branch 0 keeps the request's own seed, so `n=1` and the first of `n` branches are the same request, and branch i
    equals an independent request with seed `branch_seed(seed, i)`. Negative seeds count modulo NUM_SEEDS.
    """
    if branch < 0:
        raise ValueError(f"branch must be at least 0, got {branch}")
    if branch == 0:
        return seed
    return _mix64((seed + branch * 0x9E3779B97F4A7C15) & _MASK_64)


def arrival_seed(engine_seed: int, arrival: int) -> int:
    """Return the seed of the request with arrival number `arrival` that came without one."""
    return _mix64(_mix64(engine_seed & _MASK_64) ^ (arrival & _MASK_64))


MAX_TEMPERATURE = 100.0         # flat to within a few percent for any real model
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0               # presence and frequency penalty, either sign (OpenAI's range)
MAX_LOGIT_BIAS = 100.0          # either sign (OpenAI's range)
MAX_LOGPROB_TOKEN_IDS = 128     # as in vLLM; each costs a pass over the logits
MAX_DEADLINE_MS = 24 * 3600 * 1000  # a day
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
_MAX_ID_DIGITS = len(str(MAX_INT))


def _check_stop(field: str, value: object) -> tuple[str, ...]:
    return check_strings(field, [value] if isinstance(value, str) else value)


def _check_bias(field: str, value: object) -> dict[int, float]:
    """Return a copy of the bias with integer keys, which JSON can only send as strings of digits."""
    if not isinstance(value, Mapping):
        refuse(field, value, "a mapping from token ids to numbers")
    checked = {_token_id(key): check_float(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS) for key, bias in value.items()}
    if len(checked) != len(value):
        refuse(field, value, "a mapping that names each token id once")
    return checked


def _token_id(key: object) -> int:
    """Return a key of `logit_bias` as a token id."""
    if isinstance(key, str) and len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit():
        key = int(key)
    return check_int("logit_bias", key, 0)

_Check = Callable[[str, object], object]


def _number(low: float, high: float, *, above_low: bool = False) -> _Check:
    return partial(check_float, low=low, high=high, above_low=above_low)


def _integer(low: int, high: int = MAX_INT) -> _Check:
    return partial(check_int, low=low, high=high)


def _optional(low: int, high: int = MAX_INT) -> _Check:
    return partial(check_optional_int, low=low, high=high)


# Checks of values that are not the default, in order. Each returns what is stored: a float, a copy of a list.
_CHECKS: dict[str, _Check] = {
    "temperature": _number(0.0, MAX_TEMPERATURE),
    "top_p": _number(0.0, 1.0, above_low=True),
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": _number(0.0, MAX_REPETITION_PENALTY, above_low=True),
    "n": _integer(1),
    "top_k": _integer(-1),
    "min_tokens": _integer(0),
    "max_tokens": _optional(1),
    "logprobs": _optional(-1),
    "prompt_logprobs": _optional(-1),
    "prompt_logprob_start": _optional(0),
    "truncate_prompt_tokens": _optional(-1),
    "ttft_deadline_ms": _optional(1, MAX_DEADLINE_MS),
    "deadline_ms": _optional(1, MAX_DEADLINE_MS),
    "ignore_eos": check_bool,
    "include_stop_str_in_output": check_bool,
    "skip_special_tokens": check_bool,
    "detokenize": check_bool,
    "stop": _check_stop,
    "stop_token_ids": check_token_ids,
    "allowed_token_ids": check_token_ids,
    "bad_words": check_strings,
    "logprob_token_ids": check_token_ids,
    "prompt_logprob_token_ids": check_token_rows,
    "logit_bias": _check_bias,
}


@suggest_names
@dataclass(slots=True)
class SamplingParams:
    """Parameters of one request. A value out of range raises `InvalidRequestError`, a `ValueError`, that names it.

    Lists are stored as tuples. Ranges are those of `_CHECKS`. `temperature=0` is greedy decoding whatever the
    filters say. `top_k` 0 or -1 is off. `max_tokens=None` means as many as fit. `logprobs=k` asks for the chosen token
    and the k most likely ones, -1 for the whole vocabulary, `logprob_token_ids` for the chosen token and these instead.
    `prompt_logprob_token_ids` has a row of token ids for each prompt token but the last, from `prompt_logprob_start` on
    (0 by default): they are scored as the token that follows it. -1 is padding; an array is stored as tuples.
    `truncate_prompt_tokens=k` keeps the last k tokens of a prompt, -1 as many as leave room for the answer.
    `structured_outputs` and `repetition_detection` may also be mappings of their fields. The milliseconds of
    `ttft_deadline_ms` and `deadline_ms` count from the request's arrival: without a first token by either the request
    fails, and an answer that has begun ends at `deadline_ms` with what is there.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    ttft_deadline_ms: int | None = None
    deadline_ms: int | None = None
    guided_decoding: StructuredOutputsParams | None = None  # an earlier name, moved to the former
    flat_logprobs: bool = False  # vLLM's; True is refused

    def __post_init__(self) -> None:
        for field, default, check in _CHECKED:
            if (value := getattr(self, field)) is not default:
                setattr(self, field, check(field, value))
        self.top_k = max(0, self.top_k)
        if self.structured_outputs is not None or self.guided_decoding is not None:
            self._set_structured_outputs()
        if self.repetition_detection is not None:
            self.repetition_detection = repetition_detection_from(self.repetition_detection)
        if self.seed is not None:
            check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"an integer from 0 to max_tokens ({self.max_tokens})")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            refuse("allowed_token_ids", self.allowed_token_ids, "null or a list of at least one token id")
        if self.truncate_prompt_tokens == 0:
            refuse("truncate_prompt_tokens", 0, f"null, -1 or an integer from 1 to {MAX_INT}")
        named = self.logprob_token_ids
        if named is not None and len(named) > MAX_LOGPROB_TOKEN_IDS:
            refuse("logprob_token_ids", named, f"a list of at most {MAX_LOGPROB_TOKEN_IDS} token ids")
        if named and self.logprobs not in (None, len(named)):
            refuse("logprobs", self.logprobs, f"null or the number of logprob_token_ids ({len(named)})")
        if self.flat_logprobs is not False or self.prompt_logprob_start is not None:
            self._check_logprobs()
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings are found in text: detokenize must be true", param="stop")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` when a token id named here is not below `vocab_size`. Linear in the ids named."""
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            highest = max(getattr(self, field) or (), default=0)
            if highest >= vocab_size:
                refuse(field, highest, f"token ids below the vocabulary size of {vocab_size}")
        if self.prompt_logprob_token_ids is None:
            return
        highest = max((max(row, default=0) for row in self.prompt_logprob_token_ids), default=0)
        if highest >= vocab_size:
            refuse("prompt_logprob_token_ids", highest, f"token ids below the vocabulary size of {vocab_size}")

    def _check_logprobs(self) -> None:
        if self.flat_logprobs is not False and check_bool("flat_logprobs", self.flat_logprobs):
            refuse("flat_logprobs", self.flat_logprobs, "false: logprobs are lists with a dict for each token")
        start = self.prompt_logprob_start
        if start is not None and self.prompt_logprob_token_ids is None:
            refuse("prompt_logprob_start", start, "null without prompt_logprob_token_ids")

    def _set_structured_outputs(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                refuse("guided_decoding", self.guided_decoding, "left out where structured_outputs is given")
            self.structured_outputs = self.guided_decoding
            self.guided_decoding = None
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs_from(self.structured_outputs)


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_CHECKED = [(field, _DEFAULTS[field], check) for field, check in _CHECKS.items()]


MAX_LENGTH_PENALTY = 10.0  # either sign; any number of tokens to this power is a float, and not 0


@suggest_names
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one beam search; a value out of range raises `InvalidRequestError`, a `ValueError`, that names it.

    A beam's score is the sum of its logprobs / (generated tokens ** length_penalty). `temperature` divides the logits
    before the logprobs are taken; 0 leaves them as they are. `max_tokens=None` is as many as fit. With
    `structured_outputs` a beam has continuations that its grammar allows alone, with the logprobs that they have among
    all tokens; a beam with a complete output ends with an end-of-sequence token.
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
