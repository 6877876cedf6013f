"""Sampler: one token per row of logits, with parameters by row. An operation runs only if a row uses it.

The order of operations, for each row on its own:

1. grammar, allowed_token_ids, bad_words, min_tokens (masks), logit_bias;
2. repetition, frequency and presence penalties;
3. temperature 0: the highest logit, of equal ones the lowest id, and no further operation;
4. temperature, min_p, top_k, top_p;
5. one draw from the remaining tokens: Philox(seed of the branch, index of the output token), inverse CDF by token id.

Logprobs are those of the raw logits, before all of these; but a beam search with a temperature scores by those of
logits / temperature, and one with a grammar has the likeliest tokens of those that it allows, with the logprobs that
they have among all. The order is vLLM's, so the same parameters mean the same distribution.

A row with NaN or an infinite highest logit has no distribution, and fails. The logits of the chosen tokens show it: NaN
and infinity are chosen before any other.

A row is set when its sequence starts; its next owner replaces all of it. Steps only gather: the features of a batch are
the OR of one flag word per row, so a batch pays for a feature only if one of its rows uses it.

A forbidden token gets a logit of minus infinity. If bad_words and min_tokens forbid every allowed token of a row, they
are ignored for this draw, but grammars and allowed_token_ids never are, nor bad_words beside a grammar: a row that has
a grammar and one of the others may have no token to draw, and fails. No counts are kept between steps, so a sequence
that was preempted and resumed is penalized the same.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.deltas import TokenLogprobs
from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams, num_candidates
from quire.decoding.bad_words import BadWords
from quire.decoding.grammars.row_state import TokenMasks
from quire.kernels.sampling import SETTINGS, Penalties, SamplingOps, Tokens
from quire.kernels.tensors import Tensor, floats, take_rows

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
    num_tokens int64 [num_samples], how many of them each sample has, prompt and output; masks of the samples of rows
    with grammars.
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
        """Return what each sample is drawn by, SETTINGS [num_samples]; greedy ones have no number if all are greedy."""
        draws = self.state.draws[self.rows]
        if np.bitwise_or.reduce(self.features) & SAMPLED:
            draws["uniforms"] = self.uniforms(ops)
        return draws

    def output(self, index: int) -> NDArray[np.int32]:
        """Return the tokens [num_output] that sample `index` has generated so far."""
        row = self.rows[index]
        return self.token_ids[row, self.state.settings["num_prompt_tokens"][row] : self.num_tokens[index]]


def process_logits(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> None:
    """Process `logits` [num_samples, vocab] in place."""
    _mask(samples, logits, ops)
    lists = {i: samples.state.token_lists(samples.rows[i]) for i in samples.using(TOKEN_LISTS).tolist()}
    allowed = {i: lists[i].allowed_ids for i in samples.using(ALLOWED).tolist()}
    if allowed:
        ops.keep_tokens(logits, *_entries(allowed))
    forbidden = {i: lists[i].early_stop_ids for i in samples.using(MIN_TOKENS).tolist()}
    always_forbidden = dict[int, NDArray[np.int64]]()
    for i in samples.using(BAD_WORDS).tolist():
        completing = lists[i].bad_words.forbidden_next(samples.output(i))
        if samples.features[i] & GRAMMAR:
            always_forbidden[i] = completing
        else:
            forbidden[i] = np.concatenate([forbidden[i], completing]) if i in forbidden else completing
    if always_forbidden:
        ops.forbid_tokens(logits, *_entries(always_forbidden))
    forbidden = {sample: tokens for sample, tokens in forbidden.items() if tokens.size}
    if forbidden:
        ops.forbid_while_any_is_left(logits, *_entries(forbidden))
    biased = {i: lists[i].bias_ids for i in samples.using(BIAS).tolist()}
    if biased:
        ops.add_bias(logits, *_entries(biased), np.concatenate([lists[i].bias_values for i in biased]))
    _penalize(samples, logits, ops)


def _mask(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> None:
    """Forbid what the grammars of samples do not allow."""
    masked = samples.using(GRAMMAR)
    if not masked.size:
        return
    assert samples.masks is not None, "rows with grammars, and no masks"
    found, bits, _, late, _ = samples.masks
    concerned = np.sort(np.append(found, list(late)).astype(np.int64)) if late else found
    assert np.array_equal(concerned, masked), f"masks of {found}, {late} late, not of {masked}"
    if found.size:
        ops.mask_logits(logits, found, bits)


def _entries(ids: dict[int, NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sample and token of each id, both int64 [num]."""
    samples = np.repeat(np.fromiter(ids, dtype=np.int64, count=len(ids)), [len(tokens) for tokens in ids.values()])
    return samples, np.concatenate(list(ids.values()))


def _penalize(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> None:
    """Apply repetition, presence and frequency penalties, computed from the known tokens."""
    penalized = samples.using(PENALTIES)
    if not penalized.size:
        return
    among = samples.take(penalized)
    settings = among.settings()
    names = "num_prompt_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"
    columns = (settings[name] for name in names)
    ops.penalize(logits, Penalties(penalized, among.token_ids, among.rows, among.num_tokens, *columns))


CANDIDATES_AT_ONCE = 1 << 20  # arrays of 20 bytes each: whole vocabularies of many rows would take gigabytes
NOT_FINITE = "the model gave logits that are NaN or infinite"
NOTHING_ALLOWED = {  # reasons of failures, and the field of the request that is at fault
    "its grammar and allowed_token_ids leave no token": "allowed_token_ids",
    "its grammar and bad_words leave no token": "bad_words",
}
_BY_ALLOWED, _BY_BAD_WORDS = NOTHING_ALLOWED


class SampledTokens(NamedTuple):
    """One token per sample. `logprobs` is None when no sample asked for them, else None where one did not.

    `failures`: samples without a token, with the reason; their entries in the lists are undefined.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    failures: Mapping[int, str] = {}


def sample(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> SampledTokens:
    """Choose one token per sample, from logits float32 [num_samples, vocab].

    Steps 1 and 2, and beams' temperatures, edit `logits`: do not use them afterwards.
    """
    wanted, asking = samples.wanted, samples.using(LOGPROBS)
    if wanted & SCALED:
        _scale(samples, logits)
    raw, raw_rows = logits, asking
    if asking.size and wanted & LOGITS_PROCESSED:  # a copy of those rows alone
        raw, raw_rows = take_rows(logits, asking), np.arange(len(asking))
    choice = choose(samples, logits, wanted, ops)
    chosen = choice if isinstance(choice, np.ndarray) else choice.numpy(force=True)
    failures = _without_distribution(logits, chosen)
    for index in failures:
        features = samples.features[index]
        if features & GRAMMAR and features & (ALLOWED | BAD_WORDS):
            failures[index] = _BY_ALLOWED if features & ALLOWED else _BY_BAD_WORDS
    if not asking.size:
        return SampledTokens(chosen.tolist(), None, failures)
    counts = samples.take(asking).settings()["num_logprobs"].astype(np.int64)
    records: list[TokenLogprobs | None] = [None] * len(chosen)
    found = _token_logprobs(raw, raw_rows, chosen[asking], counts, ops)
    if wanted & NAMED_LOGPROBS:
        found = _with_named(found, samples.take(asking), raw, raw_rows, ops)
    if wanted & ALLOWED_CANDIDATES:
        found = _with_allowed(found, samples.take(asking), (logits, asking), (raw, raw_rows), ops)
    for index, record in zip(asking.tolist(), found, strict=True):
        records[index] = record
        if not is_finite(record):  # hidden from the choice by a mask
            failures[index] = NOT_FINITE
    return SampledTokens(chosen.tolist(), records, failures)


def join(parts: Sequence[SampledTokens]) -> SampledTokens:
    """Join the results of calls for one sample each into that of one call."""
    records = [part.logprobs[0] if part.logprobs else None for part in parts]
    return SampledTokens(
        [part.token_ids[0] for part in parts],
        records if any(records) else None,
        {index: why for index, part in enumerate(parts) for why in part.failures.values()},
    )


def is_finite(record: TokenLogprobs) -> bool:
    """Return whether the logits behind a record were finite: else no token has a logprob."""
    return math.isfinite(record.logprobs[0])


def _without_distribution(logits: Tensor, chosen: NDArray[np.int64]) -> dict[int, str]:
    """Return samples with chosen tokens [num_samples] that have no finite logit; logits [num_samples, vocab]."""
    found = logits[np.arange(len(chosen)), chosen]
    is_sound = np.isfinite(found if isinstance(found, np.ndarray) else floats(found))
    return {} if is_sound.all() else dict.fromkeys(np.flatnonzero(~is_sound).tolist(), NOT_FINITE)


def prompt_logprobs(
    logits: Tensor, next_tokens: NDArray[np.int64], num_logprobs: int, ops: SamplingOps
) -> list[TokenLogprobs]:
    """Return the logprobs of known tokens: row i of float32 `logits` [num, vocab] predicts `next_tokens[i]` [num]."""
    counts = np.full(len(logits), min(num_logprobs, logits.shape[1]))
    return _token_logprobs(logits, np.arange(len(logits)), next_tokens, counts, ops)


def prompt_scores(logits: Tensor, token_ids: NDArray[np.int64], ops: SamplingOps) -> NDArray[np.float32]:
    """Return the logprobs [num, width] of `token_ids` [num, width] in the rows of float32 `logits` [num, vocab].

    -inf for padding. Each costs a pass over its row, and has the bits that it has among other logprobs.
    """
    scores = np.full(token_ids.shape, -np.inf, dtype=np.float32)
    rows, columns = np.nonzero(token_ids >= 0)
    if rows.size:
        found = ops.top_logprobs(logits, rows, token_ids[rows, columns], np.zeros(len(rows), np.int64))
        scores[rows, columns] = found.logprobs[:, 0]
    return scores


def _token_logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64], ops: SamplingOps
) -> list[TokenLogprobs]:
    """Return the record of `tokens[i]` in row `rows[i]`: itself, then the `counts[i]` most likely ones in order.

    logits float32 [num_rows, vocab]; rows, tokens and counts int64 [num], counts at most the vocabulary's size.
    """
    at_once = max(1, CANDIDATES_AT_ONCE // (1 + int(counts.max(initial=0))))
    records = []
    for begin in range(0, len(rows), at_once):
        some = slice(begin, begin + at_once)
        found = ops.top_logprobs(logits, rows[some], tokens[some], counts[some])
        entries = zip(*(part.tolist() for part in found), (counts[some] + 1).tolist(), strict=True)
        records += [TokenLogprobs(ids[:end], values[:end], ranks[:end]) for ids, values, ranks, end in entries]
    return records


def _with_named(
    records: list[TokenLogprobs], samples: SamplingBatch, logits: Tensor, rows: NDArray[np.int64], ops: SamplingOps
) -> list[TokenLogprobs]:
    """Return the records of `samples` with the tokens appended that their parameters name; rows as above."""
    whole = list(records)
    for place in samples.using(NAMED_LOGPROBS).tolist():
        ids = samples.state.token_lists(int(samples.rows[place])).logprob_ids
        none = np.zeros(len(ids), np.int64)
        named = _token_logprobs(logits, np.full(len(ids), rows[place]), ids, none, ops)
        parts = (records[place], *named)
        whole[place] = TokenLogprobs(*(list(chain.from_iterable(part)) for part in zip(*parts, strict=True)))
    return whole


def _with_allowed(
    records: list[TokenLogprobs], samples: SamplingBatch, masked: tuple[Tensor, NDArray[np.int64]],
    raw: tuple[Tensor, NDArray[np.int64]], ops: SamplingOps,
) -> list[TokenLogprobs]:  # fmt: skip
    """Return the records of `samples` with candidates that the grammars of beams allow: by `masked`, scored by `raw`.

    Both are logits float32 [num_rows, vocab] and the rows of the samples. Fewer candidates if fewer are allowed.
    """
    whole, (masked_logits, masked_rows), (raw_logits, raw_rows) = list(records), masked, raw
    for place in samples.using(ALLOWED_CANDIDATES).tolist():
        chosen = np.array(records[place].token_ids[:1])
        one, count = masked_rows[place : place + 1], np.array([len(records[place].token_ids) - 1])
        [likeliest] = _token_logprobs(masked_logits, one, chosen, count, ops)
        known = zip(likeliest.token_ids, likeliest.logprobs, strict=True)
        ids = np.array([token for token, logprob in known if logprob > -math.inf], dtype=np.int64)
        scored = _token_logprobs(raw_logits, np.full(len(ids), raw_rows[place]), ids, np.zeros(len(ids), np.int64), ops)
        whole[place] = TokenLogprobs(*(list(chain.from_iterable(part)) for part in zip(*scored, strict=True)))
    return whole


def _scale(samples: SamplingBatch, logits: Tensor) -> None:
    """Divide the logits of beams by their temperatures. The highest is subtracted first, so that none overflows."""
    scaled = samples.using(SCALED)
    temperatures = samples.take(scaled).settings()["temperature"]
    with np.errstate(over="ignore", invalid="ignore"):  # what is far below the highest becomes minus infinity
        for index, temperature in zip(scaled.tolist(), temperatures.tolist(), strict=True):
            logits[index] = (logits[index] - logits[index].max()) / temperature


def choose(samples: SamplingBatch, logits: Tensor, wanted: int, ops: SamplingOps) -> Tokens:
    """Process the logits; return tokens [num_samples]: drawn if the temperature is above 0, else the highest."""
    if wanted & LOGITS_PROCESSED:
        process_logits(samples, logits, ops)
    if not wanted & SAMPLED:
        return ops.choose_tokens(logits)
    return ops.choose_tokens(logits, samples.draws(ops))
