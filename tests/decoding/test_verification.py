"""Samples at several positions of one row are those of single steps, bit for bit; drafts are kept while they agree."""

import numpy as np
import pytest

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.decoding.sampler import SampledTokens, SamplingBatch, SamplingState, sample
from quire.execution.row_results import num_accepted
from quire.kernels.sampling import SamplingOps
from support.on_tensors import logits_of

VOCAB_SIZE, NUM_DRAFTS = 60, 7
PARAMS = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 1.0, "logprobs": 0},
    {"temperature": 1.3, "min_tokens": 6, "stop_token_ids": [3, 4], "logit_bias": {5: 9.0, 6: 9.0}},
    {"temperature": 0.0, "bad_words": ["x"], "allowed_token_ids": [1, 2, 5, 9]},
]


def outcomes(sampled: SampledTokens) -> list[tuple[object, ...]]:
    logprobs = sampled.logprobs or [None] * len(sampled.token_ids)
    return list(zip(sampled.token_ids, logprobs, strict=True))


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_samples_at_several_positions_are_those_of_single_steps(params: dict[str, object], ops: SamplingOps) -> None:
    rng = np.random.default_rng(3)
    known, drafts = [1, 5, 9], rng.integers(0, VOCAB_SIZE, NUM_DRAFTS).tolist()
    new = NewRow(1, known, 1, [], SamplingParams(**params), 11, frozenset({7}), ((5, 9), (drafts[0], 2)))
    state = SamplingState(2, VOCAB_SIZE)
    state.set(new)
    token_ids = np.zeros((2, 16), dtype=np.int32)
    token_ids[1, : len(known) + NUM_DRAFTS] = known + drafts
    logits = rng.normal(0, 2, (NUM_DRAFTS + 1, VOCAB_SIZE)).astype(np.float32)
    num_tokens = len(known) + np.arange(NUM_DRAFTS + 1)

    def sampled(which: slice) -> list[tuple[object, ...]]:
        rows = np.ones(NUM_DRAFTS + 1, dtype=np.int64)[which]
        samples = SamplingBatch.of(state, rows, token_ids, num_tokens[which])
        return outcomes(sample(samples, logits_of(ops, logits[which]), ops))

    together = sampled(slice(None))
    token_ids[1, len(known) :] = -9
    for index in range(NUM_DRAFTS + 1):
        assert sampled(slice(index, index + 1)) == together[index : index + 1]
        if index < NUM_DRAFTS:
            token_ids[1, len(known) + index] = drafts[index]


@pytest.mark.parametrize(
    ("drafts", "sampled", "num"), [([4, 5], [4, 5, 6], 2), ([4, 5], [4, 9, 6], 1), ([4, 5], [9, 5, 6], 0), ([], [1], 0)]
)
def test_drafts_are_accepted_up_to_the_first_that_differs(drafts: list[int], sampled: list[int], num: int) -> None:
    assert num_accepted(drafts, sampled) == num
