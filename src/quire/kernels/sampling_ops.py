"""Sampling ops of a back end, and their PyTorch implementation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import penalties, philox, ranking, sampling, token_masks

Tokens = NDArray[np.int64] | Tensor  # one per row; a tensor where the device has yet to choose them


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation of each op of sampling; a field has the signature of the function that `TORCH` names here."""

    choose_tokens: Callable[..., Tokens]
    uniforms: Callable[[NDArray[np.uint64], NDArray[np.int64]], NDArray[np.float64]]
    top_logprobs: Callable[..., ranking.TopLogprobs]
    penalize: Callable[[Tensor, penalties.Penalties], None]
    mask_logits: Callable[[Tensor, NDArray[np.int64], NDArray[np.uint32]], None]


TORCH = SamplingOps(
    choose_tokens=sampling.choose_tokens,
    uniforms=philox.uniforms,
    top_logprobs=ranking.top_logprobs,
    penalize=penalties.penalize,
    mask_logits=token_masks.mask_logits,
)
