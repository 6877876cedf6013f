"""Choice of draft tokens from the logits of a draft model: the token that the target is likeliest to sample.

The drafter can compute the random number of the target's sample: it is a function of the seed and the output index
(`quire.decoding.sampler`). The cumulative probabilities, in the order of token ids, divide [0, 1) into one interval per
token, and the sample is the token of the interval that contains the number. The draft model's probabilities are close
to the target's, and so are its intervals. So the draft is the token with the largest share of a window around the
number. A window of width 0 would sample with the draft model's probabilities, a wide one would choose the likeliest
token; each is accepted less often. Draft model and demo model of the tests, 16 prompts, first draft tokens accepted, in
percent:

| temperature | likeliest token | same sampling | window of 0.1 | of 0.2 | of 0.4 |
| --- | --- | --- | --- | --- | --- |
| 0.4 | 58.6 | 58.1 | 59.9 | 59.6 | 59.2 |
| 0.8 | 38.0 | 40.9 | 44.5 | 44.5 | 42.7 |
| 1.0 | 30.9 | 32.9 | 36.2 | 36.0 | 34.9 |
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.logits_processors import process_logits
from quire.decoding.sampling_batch import SamplingBatch
from quire.decoding.sampling_state import GRAMMAR, LOGITS_PROCESSED, LOGPROBS, NAMED_LOGPROBS, SAMPLED, SCALED
from quire.kernels.sampling_ops import SamplingOps

HALF_WINDOW = 0.1  # by the table above
_TARGETS_ALONE = np.uint32(GRAMMAR | LOGPROBS | NAMED_LOGPROBS | SCALED)  # features of samples that drafts lack


def choose_drafts(
    samples: SamplingBatch, logits: Tensor, ops: SamplingOps
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return a token for each sample, from logits float32 [num_samples, vocab], and whether its logits were finite.

    Edits `logits`. min_p, top_k and top_p are left out: the tokens that they remove are unlikely drafts.
    """
    samples = samples._replace(features=samples.features & ~_TARGETS_ALONE)
    if samples.wanted & LOGITS_PROCESSED:
        process_logits(samples, logits, ops)
    highest, tokens = logits.max(dim=1)
    sampled = samples.using(SAMPLED)
    if sampled.size:
        which = torch.from_numpy(sampled)
        tokens[which] = _in_window(samples.take(sampled), logits[which] - highest[which, None], ops)
    return tokens.numpy(), highest.isfinite().numpy()


def _in_window(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> Tensor:
    """Return the token of each sample with the largest share of the window; logits [num_samples, vocab], at most 0."""
    settings = samples.settings()
    uniforms = ops.uniforms(settings["seed"], samples.num_tokens - settings["num_prompt_tokens"])
    centres = torch.from_numpy(uniforms.astype(np.float32))[:, None]
    probabilities = torch.softmax(logits / torch.from_numpy(settings["temperature"])[:, None], dim=1)
    uppers = probabilities.cumsum(dim=1)
    lowers = uppers - probabilities
    shares = torch.minimum(uppers, centres + HALF_WINDOW) - torch.maximum(lowers, centres - HALF_WINDOW)
    return shares.argmax(dim=1)
