"""What the sampler's tests share: rows put into a fresh state and sampled as one batch, by every back end's ops."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pytest
import torch

from quire.core.plan import NewRow
from quire.decoding.grammars.row_state import TokenMasks
from quire.decoding.sampler import SampledTokens, SamplingBatch, SamplingState, sample
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.kernels.sampling import SamplingOps
from support.on_tensors import logits_of

SampleRows = Callable[..., SampledTokens]


@pytest.fixture(scope="session", params=["cpp", "torch"])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    if request.param == "cpp" and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    return choose_back_end(torch.device("cpu"), request.param).sampling


@pytest.fixture(scope="session")
def sample_rows(ops: SamplingOps) -> SampleRows:
    """Sample each of `new_rows` once from float32 `logits` [num_rows, vocab], one batch in the order given.

    `allowed`: the tokens of rows with grammars, by place in `new_rows`.
    """

    def sample_rows(
        new_rows: Sequence[NewRow], logits: np.ndarray, allowed: Mapping[int, Collection[int]] = MappingProxyType({})
    ) -> SampledTokens:
        vocab_size = logits.shape[1]
        state = SamplingState(max(new.row for new in new_rows) + 1, vocab_size)
        longest = max(len(new.token_ids) for new in new_rows)
        # Positions behind a row's tokens hold those of an earlier sequence.
        token_ids = np.full((len(state.features), longest + 3), vocab_size - 1, dtype=np.int32)
        for new in new_rows:
            state.set(new)
            token_ids[new.row, : len(new.token_ids)] = new.token_ids
        rows = np.array([new.row for new in new_rows])
        num_tokens = np.array([len(new.token_ids) for new in new_rows])
        masks = masks_of(allowed, vocab_size) if allowed else None
        batch = SamplingBatch.of(state, rows, token_ids, num_tokens, masks)
        return sample(batch, logits_of(ops, logits), ops)

    return sample_rows


def masks_of(allowed: Mapping[int, Collection[int]], vocab_size: int) -> TokenMasks:
    """Return masks that allow these tokens, by sample, and tokens that the model does not have."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    bits[:, vocab_size:] = 1
    for own, tokens in zip(bits, (allowed[place] for place in sorted(allowed)), strict=True):
        own[list(tokens)] = 1
    return TokenMasks(np.array(sorted(allowed)), np.packbits(bits, axis=1, bitorder="little").view(np.uint32), {})
