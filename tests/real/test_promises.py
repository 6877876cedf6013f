"""Promises to the bit, with weights whose likeliest token is mostly sure and whose answers end by themselves.

What else runs, how a prompt is cut, where its blocks lie, preemption, prefix hits and drafts change no bit of an
answer. Random weights draw nearly even tokens: they repeat no text, end no sentence, and hardly ever agree with a
draft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams, branch_seed
from quire.core.sampling_params import BeamSearchParams as Params
from support.answers import Answer, answers_of
from support.beam_reference import reference_search
from support.real_text import prose

pytestmark = pytest.mark.real

MAX_MODEL_LEN = 384
NUM_TOKENS = 48
BLOCK_SIZE = 16
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 3, "n": 3},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "stop": [". "], "max_tokens": 64},
    {"temperature": 0.0, "min_tokens": 24, "logit_bias": {198: -2.0}},
    {"temperature": 0.0, "prompt_logprobs": 1},
)
WEIGHTS: Mapping[str, dict[str, Any]] = {
    "as in the file": {},
    "expanded": {"quantization_activations": "bfloat16"},
    "KV cache in int8": {"kv_cache_dtype": "int8_per_token_head"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
FROM_FLOATS = ("int8", "int4")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "at once": {},
    "chunks of 33 tokens": {"max_num_batched_tokens": 33},
    "blocks of 8": {"block_size": 8},
    "recomputed": {"num_kv_blocks": 36, "preemption_mode": "recompute"},
    "swapped": {"num_kv_blocks": 36, "preemption_mode": "swap", "num_swap_blocks": 200},
    "drafts": {"speculative_config": NGRAMS},
    "drafts, recomputed": {"speculative_config": NGRAMS, "num_kv_blocks": 26, "preemption_mode": "recompute"},
    "drafts of answers": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 5}},
}


def requests(tokenizer: Any) -> tuple[list[list[int]], list[SamplingParams]]:  # noqa: ANN401
    """Return prompts that share their beginning, with text that an answer may repeat, and parameters of all kinds."""
    system = tokenizer.encode(prose(500))
    questions = [tokenizer.encode(f"\n\nQuestion {n}: what is said of names?\nAnswer:") for n in range(len(KINDS))]
    params = [SamplingParams(**{"max_tokens": NUM_TOKENS, "logprobs": 2} | kind) for kind in KINDS]
    return [system + question for question in questions], params


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of each kind of weights and cache."""
    name = request.param
    file = request.getfixturevalue("floats" if name in FROM_FLOATS else "smollm2")
    return {"model": file, "max_model_len": MAX_MODEL_LEN, "dtype": "bfloat16"} | WEIGHTS[name]


@pytest.fixture(scope="module")
def alone(weights: dict[str, Any]) -> list[list[Answer]]:
    """Return the answers to each request by itself, with nothing in the prefix cache."""
    with LLM(**weights, enable_prefix_caching=False) as llm:
        prompts, params = requests(llm.get_tokenizer())
        return [
            answers_of(llm.generate([each], own, use_tqdm=False)[0]) for each, own in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_changes_no_bit(weights: dict[str, Any], alone: list[list[Answer]], setting: str) -> None:
    with LLM(**weights, **SETTINGS[setting]) as llm:
        prompts, params = requests(llm.get_tokenizer())
        for turn in range(2):  # the second finds the prompts in the prefix cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for kind, own, expected in zip(KINDS, outputs, alone, strict=True):
                assert answers_of(own) == expected, (kind, turn)
        stats = llm.kv_stats()
        assert stats.used_blocks == 0
    assert any(output.num_cached_tokens for output in outputs)
    metrics = [output.metrics for output in outputs if output.metrics]
    mode = SETTINGS[setting].get("preemption_mode")
    assert mode is None or stats.preemptions[mode] > 0
    accepted = sum(each.num_accepted_tokens for each in metrics)
    assert (accepted > 0) == ("speculative_config" in SETTINGS[setting])


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Any:  # noqa: ANN401
    """Return the chat model as it is in the file."""
    with LLM(smollm2, max_model_len=MAX_MODEL_LEN) as loaded:
        yield loaded


def chat(llm: LLM, question: str, **params: Any) -> RequestOutput:  # noqa: ANN401
    messages = [{"role": "user", "content": question}]
    return llm.chat(messages, SamplingParams(**{"max_tokens": 48, "temperature": 0.0} | params), use_tqdm=False)[0]


def test_branches_are_requests_of_their_own(llm: LLM) -> None:
    together = chat(llm, "Tell me a story.", n=4, seed=7, temperature=0.9)
    alone = [chat(llm, "Tell me a story.", seed=branch_seed(7, i), temperature=0.9).outputs[0] for i in range(4)]
    assert [each.token_ids for each in together.outputs] == [each.token_ids for each in alone]
    assert len({each.text for each in together.outputs}) == 4


@pytest.mark.parametrize("stop", [".", "\n\n", "hydrogen", "The water molecule"])
def test_stopped_answer_is_the_beginning_of_the_whole(llm: LLM, stop: str) -> None:
    whole, stopped = (chat(llm, "What is water made of?", **each).outputs[0] for each in ({}, {"stop": stop}))
    assert stopped.text == whole.text.partition(stop)[0]
    assert stopped.stop_reason == (stop if stop in whole.text else None)


def test_penalties_end_a_loop(llm: LLM) -> None:
    plain = chat(llm, "How do I boil an egg?", max_tokens=64).outputs[0]
    punished = chat(llm, "How do I boil an egg?", max_tokens=64, frequency_penalty=2.0).outputs[0]
    assert 2 * distinct(plain.token_ids) < distinct(punished.token_ids)


def distinct(token_ids: list[int]) -> float:
    return len(set(token_ids)) / len(token_ids)


@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (4, 1.0), (4, 0.5)])
def test_beams_are_those_of_the_textbook(llm: LLM, width: int, length_penalty: float) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("<|im_start|>user\nWhat is water made of?<|im_end|>\n<|im_start|>assistant\n")
    params = BeamSearchParams(beam_width=width, max_tokens=8, length_penalty=length_penalty)

    def logprobs_after(tokens: list[int]) -> list[float]:
        output = llm.generate([prompt + tokens], SamplingParams(max_tokens=1, logprobs=20), use_tqdm=False)[0]
        found = output.outputs[0].logprobs[0]
        return [found[token].logprob if token in found else float("-inf") for token in range(max(found) + 1)]

    expected = reference_search(logprobs_after, Params(width, 8, length_penalty=length_penalty), 8, frozenset({2, 0}))
    found = llm.beam_search([prompt], params)[0].outputs
    assert [list(each.token_ids) for each in found] == [each.token_ids for each in expected]
    assert [each.cumulative_logprob for each in found] == [pytest.approx(each.logprob, abs=1e-4) for each in expected]
