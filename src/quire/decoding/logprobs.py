"""Records of logprobs: log-softmax of the raw float32 logits, before any edit."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.core.outputs import TokenLogprobs
from quire.kernels.sampling import SamplingOps


def token_logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64], ops: SamplingOps
) -> list[TokenLogprobs]:
    """Return the record of `tokens[i]` in row `rows[i]`: itself, then the `counts[i]` most likely ones in order.

    logits float32 [num_rows, vocab]; rows, tokens and counts int64 [num], counts at most the vocabulary's size.
    """
    found = ops.top_logprobs(logits, rows, tokens, counts)
    entries = zip(*(part.tolist() for part in found), (counts + 1).tolist(), strict=True)
    return [TokenLogprobs(ids[:end], values[:end], ranks[:end]) for ids, values, ranks, end in entries]
