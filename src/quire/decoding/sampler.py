"""Sampler: one token per row of logits. An operation runs only if a row of the batch uses it.

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
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.deltas import TokenLogprobs
from quire.decoding.logits_processors import process_logits
from quire.decoding.sampling_state import (
    ALLOWED,
    ALLOWED_CANDIDATES,
    BAD_WORDS,
    GRAMMAR,
    LOGITS_PROCESSED,
    LOGPROBS,
    NAMED_LOGPROBS,
    SAMPLED,
    SCALED,
    SamplingBatch,
)
from quire.kernels.sampling import SamplingOps, Tokens
from quire.kernels.tensors import Tensor, floats, take_rows

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
    """Return the samples, of logits [num_samples, vocab], whose chosen tokens [num_samples] have no finite logit."""
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
