"""The margin rule, by which tests judge a GPU, judged itself: what it lets pass, and what it does not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.kernels.tensors import Tensor
from quire.model.decoder import Decoder
from support import margin
from support.answers import Answer, answers_of, have_equal_prompt_logprobs
from support.random_model import write_random_model

PROMPT = [(7 * i * i) % 290 for i in range(40)]
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=5, top_p=0.8, top_k=40, min_p=0.01, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    margin.turn_on(monkeypatch.setattr)


def answers(model: Path, dtype: str = "float32") -> list[Answer]:
    with LLM(model, device="cpu", dtype=dtype, num_kv_blocks=64) as llm:
        outputs = llm.generate([PROMPT] * len(KINDS), KINDS, use_tqdm=False)
        return [answer for output in outputs for answer in answers_of(output)]


def with_noise(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Let a model compute with errors up to so much in every logit."""
    logits, generator = Decoder.logits, np.random.default_rng(0)

    def noisy(self: Decoder, hidden: Tensor) -> Tensor:
        exact = logits(self, hidden)
        error = generator.uniform(-size, size, exact.shape).astype(np.float32)
        return exact + (error if isinstance(exact, np.ndarray) else torch.from_numpy(error))  # or of the reference

    monkeypatch.setattr(Decoder, "logits", noisy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_answers_are_within_the_margin(model: Path, dtype: str) -> None:
    found = answers(model, dtype)
    assert [answer.tokens_beyond_margin() for answer in found] == [[]] * 6
    if dtype == "float32":  # hardly any other token would do
        assert [answer.tokens_beyond_margin(1e-5) for answer in found] == [[]] * 6


def test_planted_wrong_token_is_beyond_it(model: Path) -> None:
    for step, answer in enumerate(answers(model), 1):
        tokens, place = list(answer.token_ids), 2 * step - 1
        tokens[place] = (tokens[place] + step) % 301
        assert answer.asked is not None
        assert place in margin.beyond_margin(answer.asked, answer.index, tokens)


@pytest.mark.parametrize(("gap", "passes"), [(0.0005, True), (0.005, False)])
def test_near_tie_passes_and_a_clear_lead_does_not(model: Path, gap: float, passes: bool) -> None:
    with LLM(model, device="cpu", num_kv_blocks=64) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, logprobs=2), use_tqdm=False)
        (first,) = output.outputs[0].logprobs or []
        likeliest, second = list(first)[:2]
        lift = first[likeliest].logprob - first[second].logprob - gap
        params = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={second: lift})
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    (answer,) = answers_of(output)
    assert answer.token_ids == (likeliest,)
    assert answer.asked is not None
    assert margin.beyond_margin(answer.asked, 0, [second], 0.001) == ([] if passes else [0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_beam_is_right_when_its_score_is_that_of_its_tokens(model: Path, temperature: float) -> None:
    with LLM(model, device="cpu", num_kv_blocks=64) as llm:
        params = BeamSearchParams(3, 6, ignore_eos=True, temperature=temperature)
        one, *_, other = answers_of(llm.beam_search([PROMPT], params, use_tqdm=False)[0])
    assert one == other, "each is right"
    assert one != replace(other, token_ids=one.token_ids)


def test_prompts_are_scored_alike_within_the_margin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = []
    for size in (0.0, 4e-4, 0.5):
        with monkeypatch.context() as patch, LLM(model, device="cpu", num_kv_blocks=64) as llm:
            with_noise(patch, size)
            outputs += llm.generate([PROMPT], params, use_tqdm=False)
    assert have_equal_prompt_logprobs(*outputs[:2])
    assert not have_equal_prompt_logprobs(*outputs[1:])


def test_small_errors_make_equal_answers_and_large_ones_do_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = answers(model)
    with_noise(monkeypatch, 4e-4)
    found = answers(model)
    monkeypatch.undo()
    assert found == exact
    margin.turn_on(monkeypatch.setattr)
    with_noise(monkeypatch, 0.5)
    wrong = answers(model)
    monkeypatch.undo()
    assert all(one != other for one, other in zip(wrong, exact, strict=True))
