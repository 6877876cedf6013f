"""The sampler: rows of logits to one token each, doing only what some row asked for.

The order of operations, in each row on its own:

1. allowed_token_ids, bad_words, min_tokens (masks), logit_bias;
2. repetition, frequency and presence penalties;
3. temperature 0: the highest logit, and of equal ones the lowest id. Done;
4. temperature, min_p, top_k, top_p;
5. one draw from what is left: Philox(seed of the branch, index of the output token), inverse CDF in the order of ids.

Logprobs are those of the raw logits, whatever the steps above did; but a beam search with a temperature scores by those
of logits / temperature. The order is vLLM's, so the same parameters mean the same distribution.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.outputs import TokenLogprobs
from quire.decoding.logprobs import token_logprobs
from quire.decoding.masks import apply_masks
from quire.decoding.penalties import apply_penalties
from quire.decoding.samples import Samples
from quire.decoding.state import EDITS, LOGPROBS, SAMPLED, SCALED, SamplingState
from quire.kernels.sampling import TORCH, SamplingOps


class SampledTokens(NamedTuple):
    """One token per sample. `logprobs` is None when no sample asked for them, else None where one did not."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


def sample(
    state: SamplingState,
    logits: Tensor,
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    num_tokens: NDArray[np.int64],
    ops: SamplingOps = TORCH,
) -> SampledTokens:
    """Choose one token per sample. Steps 1 and 2, and beams' temperatures, edit `logits`: do not use them afterwards.

    logits float32 [num_samples, vocab]; rows [num_samples], the row of `state` and `token_ids` that each sample is for;
    token_ids [max_rows, max_len], the known tokens of every row; num_tokens [num_samples], how many those are, prompt
    and output. The output index of a draw is `num_tokens` less the row's prompt tokens.
    """
    samples = Samples.of(state, rows, token_ids, num_tokens)
    wanted = int(np.bitwise_or.reduce(samples.features))
    if wanted & SCALED:
        _scale(samples, logits)
    asking = samples.using(LOGPROBS)
    raw, raw_rows = logits, asking
    if wanted & EDITS:
        if asking.size:  # a copy of those rows alone
            raw, raw_rows = logits[torch.from_numpy(asking).to(logits.device)], np.arange(len(asking))
        apply_masks(samples, logits)
        apply_penalties(samples, logits, ops)
    chosen = _choose(samples, logits, wanted, ops)
    if not asking.size:
        return SampledTokens(chosen.tolist(), None)
    counts = samples.take(asking).settings()["num_logprobs"].astype(np.int64)
    records: list[TokenLogprobs | None] = [None] * len(chosen)
    found = token_logprobs(raw, raw_rows, chosen[asking], counts, ops)
    for index, record in zip(asking.tolist(), found, strict=True):
        records[index] = record
    return SampledTokens(chosen.tolist(), records)


def prompt_logprobs(
    logits: Tensor, next_tokens: Tensor, num_logprobs: int, ops: SamplingOps = TORCH
) -> list[TokenLogprobs]:
    """Return the logprobs of known tokens: row i of float32 `logits` [num, vocab] predicts `next_tokens[i]` [num]."""
    counts = np.full(len(logits), min(num_logprobs, logits.shape[1]))
    return token_logprobs(logits, np.arange(len(logits)), next_tokens.long().numpy(force=True), counts, ops)


def _scale(samples: Samples, logits: Tensor) -> None:
    """Divide the logits of beams by their temperatures. The highest goes off first, so that none becomes infinite."""
    scaled = samples.using(SCALED)
    temperatures = samples.take(scaled).settings()["temperature"]
    for index, temperature in zip(scaled.tolist(), temperatures.tolist(), strict=True):
        logits[index] = (logits[index] - logits[index].amax()) / temperature


def _choose(samples: Samples, logits: Tensor, wanted: int, ops: SamplingOps) -> NDArray[np.int64]:
    """Return the tokens [num_samples]: drawn where the temperature is above 0, else those of the highest logits."""
    if not wanted & SAMPLED:
        return ops.argmax(logits)
    settings = samples.settings()
    temperatures = np.where(samples.features & SAMPLED, settings["temperature"], np.float32(0))
    uniforms = ops.uniforms(settings["seed"], samples.num_tokens - settings["num_prompt_tokens"])
    return ops.choose_tokens(
        logits, temperatures, settings["log_min_p"], settings["top_k"], settings["top_p"], uniforms
    )
