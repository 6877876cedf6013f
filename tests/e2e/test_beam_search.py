"""Beam search on real engines: transformers' own tokens and scores, and the same bits whatever else runs."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
WIDTHS = (2, 3, 4, 5, 6)
TOLERANCE = 1e-4  # on scores, float32; a penalty of -1 makes some of hundreds, whose last bits are worth 3e-5
MAX_TOKENS, PADDING = 12, 1
STORIES_EOS = (1, 2)


def answers_of(output: RequestOutput) -> list[tuple[list[int], str | None, str]]:
    """Tokens, finish reason and the exact sum of logprobs of each answer."""
    return [(each.token_ids, each.finish_reason, (each.cumulative_logprob or 0.0).hex()) for each in output.outputs]


def assert_equal_to_transformers(
    model: Any, llm: LLM, prompts: list[list[int]], width: int, penalty: float, eos: Sequence[int]  # noqa: ANN401
) -> set[str | None]:
    """Search with both; return how the answers ended."""
    params = BeamSearchParams(width, MAX_TOKENS, length_penalty=penalty)
    ends = set()
    for prompt, ours in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            length_penalty=penalty,
            eos_token_id=list(eos) or -1,
            pad_token_id=PADDING,
            do_sample=False,
            early_stopping=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len(ours.outputs) == width
        rows = zip(ours.outputs, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True)
        for answer, tokens, score in rows:
            length = len(answer.token_ids)
            assert answer.token_ids == tokens[len(prompt) :][:length]
            assert set(tokens[len(prompt) + length :]) <= {PADDING}
            assert answer.finish_reason == ("stop" if answer.token_ids[-1] in eos else "length")
            assert answer.cumulative_logprob is not None
            assert answer.cumulative_logprob / length**penalty == pytest.approx(score, rel=2e-6, abs=TOLERANCE)
            ends.add(answer.finish_reason)
    return ends


EOS = ((), (7,), (7, 11, 60))


@pytest.fixture(scope="module", params=EOS, ids=["no end", "one end", "three ends"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, tuple[int, ...]]:
    """A random model whose ends of sequence are none too rare."""
    torch.manual_seed(0)
    eos: tuple[int, ...] = request.param
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=list(eos) or None, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, folder, eos


def test_tokens_and_scores_of_random_models_are_those_of_transformers(tiny: tuple[Any, Path, tuple[int, ...]]) -> None:
    model, folder, eos = tiny
    ends: set[str | None] = set()
    with LLM(str(folder), dtype="float32") as llm:
        first = EOS.index(eos)  # each width with other penalties beside other ends: `make matrix` has the product
        for width, penalty in zip(WIDTHS, PENALTIES[first:] + PENALTIES[:first], strict=True):
            ends |= assert_equal_to_transformers(model, llm, [[3, 9, 27, 50]], width, penalty, eos)
    assert ends == ({"length", "stop"} if eos else {"length"})


def check_stories(folder: Path, cases: Iterable[tuple[int, float]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(str(folder), dtype="float32") as llm:
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(text) for text in ("Once upon a time", "Lily said goodbye. They lived")]
        for width, penalty in cases:
            assert_equal_to_transformers(model, llm, prompts, width, penalty, STORIES_EOS)


def test_tokens_and_scores_of_a_real_model_are_those_of_transformers(stories260k: Path) -> None:
    check_stories(stories260k, ((2, 1.0), (3, -1.0), (4, 2.0), (6, 0.0)))


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_every_width_and_penalty_gives_what_transformers_gives(stories260k: Path) -> None:
    check_stories(stories260k, product(WIDTHS, PENALTIES))


# --- the same bits, whatever else runs --------------------------------------------------------------------------------

PROMPTS = [[5 + (i * 37) % 400 for i in range(length)] for length in (60, 33, 16)]
SEARCH = BeamSearchParams(4, 24, temperature=0.7)


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> list[list[tuple[list[int], str | None, str]]]:
    with LLM(str(demo_model), max_model_len=256, enable_prefix_caching=False) as llm:
        return [answers_of(llm.beam_search([prompt], SEARCH, use_tqdm=False)[0]) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 3},
        {"block_size": 8, "max_num_batched_tokens": 7},
        {"block_size": 64, "max_num_batched_tokens": 50},
        {"block_size": 8, "num_kv_blocks": 34, "max_num_batched_tokens": 30},
        {"block_size": 8, "num_kv_blocks": 34, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_searches_beside_samples_and_greedy_requests_keep_their_bits(
    demo_model: Path, alone: list[Any], engine: dict[str, Any]
) -> None:
    others = [
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=40, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1),
    ]
    with LLM(str(demo_model), max_model_len=256, **engine) as llm:
        expected = [llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs for params in others]
        streams = [llm.stream([PROMPTS[1]], params) for params in others]
        for stream in streams:
            next(stream)
        found = llm.beam_search(PROMPTS, SEARCH, use_tqdm=False)
        got = [list(stream)[-1].outputs for stream in streams]
        preemptions = sum(output.metrics.num_preemptions for output in found if output.metrics)
        assert llm.kv_stats().used_blocks == 0
    assert [answers_of(output) for output in found] == alone
    assert got == expected
    assert (preemptions > 0) == ("num_kv_blocks" in engine)


def test_search_that_is_asked_again_finds_its_prompt(demo_model: Path, alone: list[Any]) -> None:
    with LLM(str(demo_model), max_model_len=256) as llm:
        for expected_cached in (0, 59, 59):
            output = llm.beam_search([PROMPTS[0]], SEARCH, use_tqdm=False)[0]
            assert output.num_cached_tokens == expected_cached
            assert answers_of(output) == alone[0]


def test_one_beam_is_greedy(demo_model: Path) -> None:
    with LLM(str(demo_model), max_model_len=256) as llm:
        beam = llm.beam_search(PROMPTS, BeamSearchParams(1, 20, ignore_eos=True), use_tqdm=False)
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in beam] == [output.outputs[0].token_ids for output in greedy]
    assert [output.outputs[0].text for output in beam] == [output.outputs[0].text for output in greedy]


def test_greedy_answer_scores_no_better_than_the_best_beam(demo_model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    beams = BeamSearchParams(6, 20, ignore_eos=True)
    with LLM(str(demo_model), max_model_len=256) as llm:
        for prompt in PROMPTS:
            best = llm.beam_search([prompt], beams, use_tqdm=False)[0].outputs
            logprobs = [each.cumulative_logprob for each in best]
            assert logprobs == sorted(logprobs, key=lambda value: -(value or 0.0))
            single = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].cumulative_logprob
            assert (logprobs[0] or 0.0) >= (single or 0.0) - TOLERANCE


def test_whole_searches_under_a_tiny_vocabulary(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=4, n_embd=16, n_layer=1, n_head=2, n_positions=64, eos_token_id=1)
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        for width in (1, 2, 3, 4):
            (output,) = llm.beam_search([[0, 2, 3]], BeamSearchParams(width, 5), use_tqdm=False)
            assert len({tuple(each.token_ids) for each in output.outputs}) == width
        with pytest.raises(ValueError, match=r"beam_width must be at most 4 \(the vocabulary size\), got 5"):
            llm.beam_search([[0]], BeamSearchParams(5, 5), use_tqdm=False)
