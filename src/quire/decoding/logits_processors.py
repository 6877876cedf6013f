"""Logits processors: grammars, allowed_token_ids, bad_words, min_tokens, logit_bias and penalties, in this order.

A forbidden token gets a logit of minus infinity. If bad_words and min_tokens forbid every allowed token of a row, they
are ignored for this draw, but grammars and allowed_token_ids never are, nor bad_words beside a grammar: a row that has
a grammar and one of the others may have no token to draw, and fails. No counts are kept between steps, so a sequence
that was preempted and resumed is penalized the same.
"""

import numpy as np
from numpy.typing import NDArray

from quire.decoding.sampling_state import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    GRAMMAR,
    MIN_TOKENS,
    PENALTIES,
    TOKEN_LISTS,
    SamplingBatch,
)
from quire.kernels.logits import Penalties
from quire.kernels.sampling import SamplingOps
from quire.kernels.tensors import Tensor


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
