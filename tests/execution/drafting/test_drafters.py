"""Speculative decoding on a real model: answers with drafts are those without, to the bit."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.page import Counter

# Texts that repeat themselves and texts that do not.
PROMPTS = [
    [5, 6, 7, 8, 9, 10] * 6,
    [3, 4],
    [(11 * i * i) % 290 for i in range(40)],
    [40, 41, 42, 43] * 5,
    list(range(20, 31)) * 3,
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=1, top_p=0.9, max_tokens=40, n=3),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, frequency_penalty=0.3, max_tokens=41, logprobs=2),
    SamplingParams(temperature=0.3, seed=3, min_tokens=4, logit_bias={5: 3.0}, stop_token_ids=[5], max_tokens=50),
    SamplingParams(temperature=0.5, seed=4, repetition_penalty=1.1, logprobs=0, prompt_logprobs=1, max_tokens=40),
]


def answers(model: Path, **settings: Any) -> list[object]:  # noqa: ANN401
    with LLM(model, **{"max_num_batched_tokens": 64} | settings) as llm:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS, use_tqdm=False)
        assert llm.kv_stats().used_blocks == 0
    return [
        [(b.text, b.token_ids, b.logprobs, b.cumulative_logprob, b.finish_reason, b.stop_reason) for b in each.outputs]
        for each in outputs
    ] + [each.prompt_logprobs for each in outputs]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "settings", [{"num_kv_blocks": 80}, {"num_kv_blocks": 14, "num_swap_blocks": 9}], ids=["room", "preemption"]
)
def test_answers_are_the_same_to_the_bit(settings: dict[str, int], method: str, demo_model: Path) -> None:
    drafting = {"method": method, "num_speculative_tokens": 5}
    assert answers(demo_model, **settings) == answers(demo_model, **settings, speculative_config=drafting)


def test_drafts_are_counted_by_position_and_by_request(demo_model: Path) -> None:
    with LLM(demo_model, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS, use_tqdm=False)
        found = [metric for metric in llm.get_metrics() if isinstance(metric, Counter)]
    values = {metric.name.removeprefix("vllm:spec_decode_num_"): metric.value for metric in found}
    by_position = [metric.value for metric in found if "position" in metric.labels]
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[3:] == [0] * 13
    assert 0 < sum(by_position) == values["accepted_tokens"] < values["draft_tokens"] <= 3 * values["drafts"]
    told = [each.metrics for each in outputs if each.metrics is not None]
    assert sum(each.num_accepted_tokens for each in told) == values["accepted_tokens"]
    assert sum(each.num_draft_tokens for each in told) == values["draft_tokens"]


def test_drafts_come_from_outputs_of_the_same_salt_alone(demo_model: Path) -> None:
    """The same prompt again: with its salt it has drafts from the first answer, with another as if it came first."""
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=60, ignore_eos=True)

    def drafts(llm: LLM, salt: str) -> tuple[list[int], int]:
        prompt = {"prompt_token_ids": [50, 60, 70], "cache_salt": salt}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.metrics is not None
        return list(output.outputs[0].token_ids), output.metrics.num_accepted_tokens

    with LLM(demo_model, spec_method="suffix") as llm:
        tokens, num_alone = drafts(llm, "a")
        assert drafts(llm, "b") == (tokens, num_alone)
        again, num_shared = drafts(llm, "a")
    assert again == tokens
    assert num_shared > num_alone
