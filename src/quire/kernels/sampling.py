"""Token sampling: the settings of a row's draw, and the ops of a back end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.kernels.logits import Penalties
from quire.kernels.tensors import Tensor

SETTINGS = np.dtype([          # a row's draw, 32 bytes
    ("top_ps", np.float64),       # 1 is off
    ("uniforms", np.float64),     # [0, 1)
    ("temperatures", np.float32),  # 0: the highest logit, and nothing else counts
    ("log_min_ps", np.float32),   # minus infinity is off
    ("top_ks", np.int64),         # from 1; the vocabulary's size is off
])  # fmt: skip


Tokens = Any  # one per row; a tensor where the device has yet to choose them


Edit = Callable[[Tensor, NDArray[np.int64], NDArray[np.int64]], None]  # as in `logits`: of (row, token) entries


class TopLogprobs(NamedTuple):
    """Arrays [num, 1 + max(counts)]: a row's token, then its likeliest, in order; behind those, nothing is said."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]  # from 1


def empty_logprobs(counts: NDArray[np.int64]) -> TopLogprobs:
    """Return room for the answer."""
    shape = (len(counts), 1 + int(counts.max(initial=0)))
    return TopLogprobs(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64))


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation of each op of sampling; fields have the signatures of `reference.sampling.SAMPLING`'s."""

    choose_tokens: Callable[..., Tokens]
    uniforms: Callable[[NDArray[np.uint64], NDArray[np.int64]], NDArray[np.float64]]
    top_logprobs: Callable[..., TopLogprobs]
    penalize: Callable[[Tensor, Penalties], None]
    mask_logits: Callable[[Tensor, NDArray[np.int64], NDArray[np.uint32]], None]
    keep_tokens: Edit
    forbid_tokens: Edit
    forbid_while_any_is_left: Edit
    add_bias: Callable[[Tensor, NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]], None]


def pack_settings(draws: NDArray[np.void]) -> NDArray[np.float64]:
    """Return SETTINGS [num_rows] as one table [num_rows, 4], which a device is sent in one piece."""
    return draws.view(np.float64).reshape(-1, 4)
