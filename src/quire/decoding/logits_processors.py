"""Logits processors: grammars, allowed_token_ids, bad_words, min_tokens, logit_bias and penalties, in this order.

A forbidden token gets a logit of minus infinity. If bad_words and min_tokens forbid every allowed token of a row, they
are ignored for this draw, but grammars and allowed_token_ids never are, nor bad_words beside a grammar: a row that has
a grammar and one of the others may have no token to draw, and fails. No counts are kept between steps, so a sequence
that was preempted and resumed is penalized the same.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from quire.kernels.reference.logits import upload
from quire.kernels.sampling import SamplingOps

FEW_TOKENS = 64
LogitIndices = tuple[Tensor, Tensor]  # sample and token id of each index, both int64 [num], on the logits' device


def process_logits(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> None:
    """Process `logits` [num_samples, vocab] in place."""
    _mask(samples, logits, ops)
    lists = {i: samples.state.token_lists(samples.rows[i]) for i in samples.using(TOKEN_LISTS).tolist()}
    _keep_allowed(logits, {i: lists[i].allowed_ids for i in samples.using(ALLOWED).tolist()})
    forbidden = {i: lists[i].early_stop_ids for i in samples.using(MIN_TOKENS).tolist()}
    always_forbidden = dict[int, NDArray[np.int64]]()
    for i in samples.using(BAD_WORDS).tolist():
        completing = lists[i].bad_words.forbidden_next(samples.output(i))
        if samples.features[i] & GRAMMAR:
            always_forbidden[i] = completing
        else:
            forbidden[i] = np.concatenate([forbidden[i], completing]) if i in forbidden else completing
    if always_forbidden:
        logits[_logit_indices(logits, always_forbidden)] = -torch.inf
    _forbid(logits, forbidden)
    biased = samples.using(BIAS).tolist()
    _add_bias(logits, {i: lists[i].bias_ids for i in biased}, [lists[i].bias_values for i in biased])
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


def _logit_indices(logits: Tensor, ids: dict[int, NDArray[np.int64]]) -> LogitIndices:
    """Return the indices in `logits` of the ids of each sample."""
    samples = np.repeat(np.fromiter(ids, dtype=np.int64, count=len(ids)), [len(tokens) for tokens in ids.values()])
    return upload(samples, logits.device), upload(np.concatenate(list(ids.values())), logits.device)


def _rows(logits: Tensor, ids: dict[int, NDArray[np.int64]]) -> Tensor:
    """Return the samples that have ids, int64 [len(ids)]."""
    return upload(np.fromiter(ids, dtype=np.int64, count=len(ids)), logits.device)


def _keep_allowed(logits: Tensor, ids: dict[int, NDArray[np.int64]]) -> None:
    """Forbid all tokens but the given ids."""
    if not ids:
        return
    places = _logit_indices(logits, ids)
    kept = logits[places]
    logits.index_fill_(0, _rows(logits, ids), -torch.inf)
    logits[places] = kept


def _forbid(logits: Tensor, ids: dict[int, NDArray[np.int64]]) -> None:
    """Forbid the given ids, except in samples that would have no token left."""
    ids = {sample: tokens for sample, tokens in ids.items() if tokens.size}
    if not ids:
        return
    places = _logit_indices(logits, ids)
    before = logits[places]
    logits[places] = -torch.inf
    rows = _rows(logits, ids)
    if logits.device.type == "cpu":  # most rows have a finite logit among the first; a GPU would have to synchronize
        rows = rows[logits[:, :FEW_TOKENS][rows].amax(dim=1) == -torch.inf]
        if not len(rows):
            return
    is_relaxed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    is_relaxed[rows] = logits[rows].amax(dim=1) == -torch.inf
    logits[places] = torch.where(is_relaxed[places[0]], before, -torch.inf)


def _add_bias(logits: Tensor, ids: dict[int, NDArray[np.int64]], values: Sequence[NDArray[np.float32]]) -> None:
    """Add a bias to each given id; no id occurs twice in one sample."""
    if not ids:
        return
    places = _logit_indices(logits, ids)
    logits[places] = logits[places] + upload(np.concatenate(values), logits.device)


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
