"""SamplingState: the sampling parameters of every running sequence, row by row, in NumPy arrays.

A row is set when its sequence starts; its next owner replaces all of it. Steps only gather: the features of a batch are
the OR of one flag word per row, so a batch pays for a feature only if one of its rows uses it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.beam_search_params import num_candidates
from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.decoding.bad_words import BadWords
from quire.decoding.row_grammars import TokenMasks
from quire.kernels.sampling import SETTINGS, SamplingOps

# Features of a row beyond the highest logit: the bits of `SamplingState.features`.
SAMPLED = 1 << 0
ALLOWED = 1 << 1
BAD_WORDS = 1 << 2
MIN_TOKENS = 1 << 3
BIAS = 1 << 4
PENALTIES = 1 << 5
LOGPROBS = 1 << 6
SCALED = 1 << 7  # the logprobs are of logits divided by the temperature
GRAMMAR = 1 << 8  # a mask of tokens comes with each step
NAMED_LOGPROBS = 1 << 9  # the logprobs are those of tokens that the parameters name
ALLOWED_CANDIDATES = 1 << 10  # most candidates of a beam: tokens that its grammar allows
TOKEN_LISTS = ALLOWED | BAD_WORDS | MIN_TOKENS | BIAS  # they name tokens
LOGITS_PROCESSED = TOKEN_LISTS | PENALTIES | GRAMMAR            # they change logits

ROW_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("log_min_p", np.float32),        # -inf when off
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),              # the size of the vocabulary when off
        ("num_prompt_tokens", np.int32),
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),
    ],
    align=True,
)

# A smaller penalty would make a logit infinite, or 0 in float32 and then NaN: forbidden tokens would be drawn.
_MIN_REPETITION_PENALTY = 1e-20
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # a smaller one would be 0 in float32, and 0 / 0 no probability


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The token ids that a row's parameters name, and the bias of each id in `bias_ids`."""

    allowed_ids: NDArray[np.int64]
    early_stop_ids: NDArray[np.int64]  # end of sequence and stop tokens, forbidden before min_tokens
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    bad_words: BadWords
    logprob_ids: NDArray[np.int64]

    @classmethod
    def of(cls, new: NewRow, bad_words: BadWords) -> "TokenLists":
        """Collect the token ids that `new` names; lists that were not given are empty."""
        bias = new.params.logit_bias or {}
        return cls(
            allowed_ids=_ids(new.params.allowed_token_ids or ()),
            early_stop_ids=_ids(new.eos_token_ids.union(new.params.stop_token_ids or ())),
            bias_ids=_ids(bias),
            bias_values=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            bad_words=bad_words,
            logprob_ids=_ids(new.params.logprob_token_ids or ()),
        )


class SamplingState:
    """Parameters of all rows.

    features: uint32 [max_rows], the flags above. settings: ROW_DTYPE [max_rows]. draws: SETTINGS [max_rows], without
    the uniform numbers, which each step has. lists: per row, None if a row names no tokens.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.features = np.zeros(max_rows, dtype=np.uint32)
        self.settings = np.zeros(max_rows, dtype=ROW_DTYPE)
        self.draws = np.zeros(max_rows, dtype=SETTINGS)
        self.lists: list[TokenLists | None] = [None] * max_rows
        self._words: tuple[tuple[int, ...], ...] = ()  # the latest row's: branches of a request come in sequence
        self._bad_words = BadWords(self._words)

    def set(self, new: NewRow) -> None:
        """Set row `new.row`. Every token id that it names was checked against the vocabulary."""
        features = _features(new)
        self.features[new.row] = features
        self.settings[new.row] = _settings(new, self.vocab_size)
        own = self.settings[new.row]
        temperature = own["temperature"] if features & SAMPLED else 0
        self.draws[new.row] = own["top_p"], 0, temperature, own["log_min_p"], own["top_k"]
        has_lists = features & (TOKEN_LISTS | NAMED_LOGPROBS)
        self.lists[new.row] = TokenLists.of(new, self._bad_words_of(new)) if has_lists else None

    def _bad_words_of(self, new: NewRow) -> BadWords:
        if new.bad_words_token_ids is not self._words:
            self._words, self._bad_words = new.bad_words_token_ids, BadWords(new.bad_words_token_ids)
        return self._bad_words

    def token_lists(self, row: int) -> TokenLists:
        """Return the lists of a row that has some."""
        lists = self.lists[row]
        assert lists is not None, f"row {row} names no tokens"
        return lists


def _features(new: NewRow) -> int:
    """Return the flags of the features that a new row uses."""
    params = new.params
    flags = {
        SAMPLED: params.temperature > 0 and new.beam is None,
        ALLOWED: params.allowed_token_ids is not None,
        BAD_WORDS: bool(new.bad_words_token_ids),
        MIN_TOKENS: params.min_tokens > 0 and bool(new.eos_token_ids or params.stop_token_ids),
        BIAS: bool(params.logit_bias),
        PENALTIES: _penalties(params) != (1.0, 0.0, 0.0),
        LOGPROBS: params.logprobs is not None or new.beam is not None,
        NAMED_LOGPROBS: bool(params.logprob_token_ids),
        GRAMMAR: params.structured_outputs is not None,
        ALLOWED_CANDIDATES: params.structured_outputs is not None and new.beam is not None,
        SCALED: new.beam is not None and params.temperature not in (0, 1),
    }
    return sum(flag for flag, is_used in flags.items() if is_used)


def _settings(new: NewRow, vocab_size: int) -> tuple[float, ...]:
    """Return the fields of ROW_DTYPE for a new row."""
    params = new.params
    log_min_p = np.log(params.min_p) if params.min_p > 0 else -np.inf
    top_k = min(params.top_k or vocab_size, vocab_size)
    num_logprobs = 0 if params.logprob_token_ids else params.logprobs or 0
    if new.beam is not None:
        num_logprobs = num_candidates(new.beam, len(new.eos_token_ids))
    temperature = max(params.temperature, _MIN_TEMPERATURE)
    counts = (top_k, new.num_prompt_tokens, params.min_tokens, min(num_logprobs, vocab_size))
    return (new.seed, params.top_p, temperature, log_min_p, *_penalties(params), *counts)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Return the penalties in the order of ROW_DTYPE."""
    repetition = max(params.repetition_penalty, _MIN_REPETITION_PENALTY)
    return repetition, params.presence_penalty, params.frequency_penalty


def _ids(tokens: Collection[int]) -> NDArray[np.int64]:
    """Return token ids as an array."""
    return np.fromiter(tokens, dtype=np.int64, count=len(tokens))


class SamplingBatch(NamedTuple):
    """The samples of a step, one for each row of its logits.

    features uint32 [num_samples], the flags of `SamplingState` that each uses in this step; rows int64 [num_samples],
    the row of `state` and `token_ids` that each is for; token_ids [max_rows, max_len], the known tokens of every row;
    num_tokens int64 [num_samples], how many of them each sample has, prompt and output; masks of the samples whose rows
    have grammars.
    """

    state: SamplingState
    features: NDArray[np.uint32]
    rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    masks: TokenMasks | None = None

    @classmethod
    def of(
        cls,
        state: SamplingState,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        masks: TokenMasks | None = None,
    ) -> "SamplingBatch":
        """Collect the features of each sample in this step: min_tokens only below that number of tokens."""
        features = state.features[rows]
        early = np.flatnonzero(features & MIN_TOKENS)
        if early.size:
            settings = state.settings[rows[early]]
            has_enough = num_tokens[early] - settings["num_prompt_tokens"] >= settings["min_tokens"]
            features[early[has_enough]] &= ~np.uint32(MIN_TOKENS)
        return cls(state, features, rows, token_ids, num_tokens, masks)

    @property
    def wanted(self) -> int:
        """The flags that any sample uses."""
        return int(np.bitwise_or.reduce(self.features))

    def using(self, features: int) -> NDArray[np.int64]:
        """Return the samples that use any of `features`, ascending."""
        return np.flatnonzero(self.features & features)

    def take(self, which: NDArray[np.int64]) -> "SamplingBatch":
        """Return some of the samples, in the order given, without masks."""
        return SamplingBatch(
            self.state, self.features[which], self.rows[which], self.token_ids, self.num_tokens[which]
        )

    def settings(self) -> NDArray[np.void]:
        """Return each sample's settings, ROW_DTYPE [num_samples]."""
        return self.state.settings[self.rows]

    def uniforms(self, ops: SamplingOps) -> NDArray[np.float64]:
        """Return the number in [0, 1) of each sample: Philox of the row's seed and the index of the output token."""
        settings = self.state.settings[self.rows]
        return ops.uniforms(settings["seed"], self.num_tokens - settings["num_prompt_tokens"])

    def draws(self, ops: SamplingOps) -> NDArray[np.void]:
        """Return what each sample is drawn by, SETTINGS [num_samples]."""
        draws = self.state.draws[self.rows]
        draws["uniforms"] = self.uniforms(ops)
        return draws

    def output(self, index: int) -> NDArray[np.int32]:
        """Return the tokens [num_output] that sample `index` has generated so far."""
        row = self.rows[index]
        return self.token_ids[row, self.state.settings["num_prompt_tokens"][row] : self.num_tokens[index]]
