"""Logprobs of the token ids that a request names for its prompt (`prompt_logprob_token_ids`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.core.errors import InvalidRequestError
from quire.core.outputs import RequestOutput


def test_named_tokens_of_a_prompt_are_scored_as_transformers_does(demo_model: Path) -> None:
    """Also in chunks, beside requests that are preempted, with the bits that prompt_logprobs have."""
    model, random = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32), np.random.default_rng(5)
    prompts = [random.integers(0, 500, size).tolist() for size in (40, 2, 61, 33)]
    found = []
    for settings in ({"num_kv_blocks": 64}, {"num_kv_blocks": 9, "max_num_batched_tokens": 16}):
        with LLM(demo_model, dtype="float32", max_model_len=128, enable_prefix_caching=True, **settings) as llm:
            for start in (0, 1, 30):
                some = [prompt for prompt in prompts if len(prompt) > start + 1]
                rows = [[[*prompt[at + 1 : at + 2], 300][: 1 + at % 2] for at in range(start, len(prompt) - 1)]
                        for prompt in some]  # fmt: skip
                params = [
                    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=0,
                                   prompt_logprob_token_ids=own, prompt_logprob_start=start)
                    for own in rows
                ]  # fmt: skip
                outputs = llm.generate(some, params, use_tqdm=False)
                found.append([output.prompt_token_id_logprobs for output in outputs])
                for prompt, output in zip(some, outputs, strict=True):
                    assert_scored(model, prompt, start, output)
            preemptions = llm.kv_stats().preemptions
    assert sum(preemptions.values()) > 0, "the second engine has too few blocks"
    for unhindered, others in zip(found[:3], found[3:], strict=True):
        assert all(map(np.array_equal, unhindered, others))


def assert_scored(model: Any, prompt: list[int], start: int, output: RequestOutput) -> None:  # noqa: ANN401 (untyped)
    """Assert that rows of the token that follows, and of 300 in every second one, have the scores of `model`."""
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=1).numpy()
    scores, listed = output.prompt_token_id_logprobs, output.prompt_logprobs
    assert scores is not None
    assert listed is not None
    assert (scores.dtype, scores.shape[0]) == (np.float32, len(prompt) - 1 - start)
    for row, at in zip(scores, range(start, len(prompt) - 1), strict=True):
        following = listed[at + 1]
        assert following is not None
        assert row[0] == following[prompt[at + 1]].logprob
        assert row[0] == pytest.approx(expected[at, prompt[at + 1]], abs=1e-4)
        if len(row) == 2:
            assert row[1] == (pytest.approx(expected[at, 300], abs=1e-4) if at % 2 else -np.inf)


def test_rows_of_scored_tokens_fit_the_prompt_and_the_bounds(demo_model: Path) -> None:
    llm = LLM(demo_model, max_model_len=64)
    for prompt, rows, start, told in (
        ([5, 6, 7], [[1]], None, "must have 2 scored rows, one for each of 3 prompt tokens"),
        ([5, 6, 7], [[1], [2]], 1, "must have 1 scored rows, .*, from prompt_logprob_start 1 on, got 2"),
        ([5, 6, 7], [[1]], 5, "must have 0 scored rows"),
        ([5, 6], [[1] * 21], None, r"at most 20 token ids \(max_logprobs\), got 21"),
        ([5, 6], [[10**6]], None, "below the vocabulary size"),
    ):
        params = SamplingParams(max_tokens=1, prompt_logprob_token_ids=rows, prompt_logprob_start=start)
        with pytest.raises(InvalidRequestError, match=told) as refused:
            llm.generate([prompt], params, use_tqdm=False)
        assert refused.value.param == "prompt_logprob_token_ids"
    llm.close()
