"""Sampling of a step without waiting for the device that computes it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.sampler import LOGPROBS, NOT_FINITE, SAMPLED, SCALED, SampledTokens, SamplingBatch, choose
from quire.kernels.sampling import SamplingOps, Tokens


def sample_async(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> Tensor:
    """Do what `sample` does without waiting for the device; for samples without logprobs.

    Returns int64 [2, num_samples], where the logits are: the tokens, and whether each has a finite logit.
    """
    wanted = samples.wanted
    assert not wanted & (LOGPROBS | SCALED), "logprobs have to be waited for"
    return _with_soundness(choose(samples, logits, wanted, ops), logits)


def sample_on_device(settings: Tensor, logits: Tensor, ops: SamplingOps) -> Tensor:
    """Do what `sample_async` does, for samples of `device_settings` that are on the device: also in a CUDA graph."""
    return _with_soundness(ops.choose_tokens(logits, settings), logits)


def device_settings(samples: SamplingBatch, ops: SamplingOps) -> NDArray[np.void] | None:
    """Return the settings of samples, SETTINGS [num_samples]; None if one needs more than a draw or an argmax."""
    if samples.wanted & ~SAMPLED:
        return None
    return samples.draws(ops)


def _with_soundness(choice: Tokens, logits: Tensor) -> Tensor:
    tokens = choice if isinstance(choice, Tensor) else torch.from_numpy(choice)
    return torch.stack([tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite()])


def to_sampled_tokens(drawn: Tensor) -> SampledTokens:
    """Return the result of `sample` from that of `sample_async`."""
    token_ids, is_sound = drawn.tolist()
    failures = {} if all(is_sound) else {i: NOT_FINITE for i, sound in enumerate(is_sound) if not sound}
    return SampledTokens(token_ids, None, failures)
