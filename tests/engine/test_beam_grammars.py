"""Beam searches with grammars: the search of the textbook over the allowed tokens, the same bits in a crowd."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.core.errors import InvalidRequestError
from quire.engine.metrics.page import Counter
from support.beam_reference import reference_search

PROMPT = "def f(x):"
CHOICES = StructuredOutputsParams(choice=["a first answer", "a second answer", "another", "none"])
KINDS = {
    "regex": StructuredOutputsParams(regex=r"[A-C]{1,2}-\d{1,2}"),
    "choice": CHOICES,
    "json": StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
              "required": ["a", "b"], "additionalProperties": False},
        disable_any_whitespace=True,
    ),
}  # fmt: skip
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, max_model_len=96, max_logprobs=-1, num_kv_blocks=200) as llm:
        yield llm


def search(llm: LLM, prompts: list[str], params: BeamSearchParams) -> list[list[tuple[list[int], float, str, str]]]:
    """Return tokens, logprob, reason and text of every output."""

    def told(output: RequestOutput) -> list[tuple[list[int], float, str, str]]:
        return [
            (list(each.token_ids), each.cumulative_logprob or 0.0, each.finish_reason or "", each.text)
            for each in output.outputs
        ]

    return [told(output) for output in llm.beam_search(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_search_is_the_textbook_s_over_the_allowed_tokens(llm: LLM, kind: str, temperature: float) -> None:
    grammars = llm._engine.engine.grammars
    assert grammars is not None
    assert llm.tokenizer is not None
    compiled = grammars._cache.get(KINDS[kind])
    prompt, eos = llm.tokenizer.encode(PROMPT), llm._engine.ready.eos_token_ids
    seen = dict[tuple[int, ...], list[float]]()

    def logprobs_after(tokens: list[int]) -> list[float]:
        if tuple(tokens) not in seen:
            one = SamplingParams(max_tokens=1, logprobs=-1, temperature=0, ignore_eos=True)
            [position] = llm.generate([prompt + tokens], one, use_tqdm=False)[0].outputs[0].logprobs or []
            raw = np.array([position[token].logprob for token in range(llm.vocab_size)]) / (temperature or 1)
            raw -= np.logaddexp.reduce(raw)
            matcher = compiled.start()
            assert not tokens or matcher.consume_tokens(tokens)
            bits = np.zeros(-(-compiled.tokenizer.vocab_size // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: llm.vocab_size]
            seen[tuple(tokens)] = np.where(allowed, raw, -np.inf).tolist()
        return seen[tuple(tokens)]

    params = BeamSearchParams(3, MAX_TOKENS, temperature=temperature, structured_outputs=KINDS[kind])
    expected = reference_search(logprobs_after, params, MAX_TOKENS, eos)
    [found] = search(llm, [PROMPT], params)
    assert [tokens for tokens, *_ in found] == [each.token_ids for each in expected]
    assert [reason for _, _, reason, _ in found] == [each.finish_reason for each in expected]
    np.testing.assert_allclose([total for _, total, *_ in found], [each.logprob for each in expected], rtol=1e-4)
    assert all(text in (CHOICES.choice or ()) for *_, text in found if kind == "choice")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_bits_are_the_same_in_a_crowd(llm: LLM, demo_model: Path, mode: str) -> None:
    prompts = [PROMPT, "import os\n", "class A:\n    ", "for i in range(3):"]
    long = StructuredOutputsParams(regex=r"([a-c]{1,3} ?-){14}")
    params = BeamSearchParams(4, 60, structured_outputs=long)
    alone = [search(llm, [prompt], params)[0] for prompt in prompts]
    with LLM(
        demo_model, max_model_len=96, num_kv_blocks=40, block_size=8, max_num_batched_tokens=24, preemption_mode=mode,
        num_swap_blocks=100 if mode == "swap" else 0,
    ) as crowded:  # fmt: skip
        assert search(crowded, prompts, params) == alone
        preemptions = [each for each in crowded.get_metrics() if each.name == "vllm:num_preemptions"]
        assert sum(each.value for each in preemptions if isinstance(each, Counter)) > 0
        assert crowded.kv_stats().used_blocks == 0


def test_grammar_with_fewer_outputs_than_beams_fails_its_request(llm: LLM) -> None:
    one = StructuredOutputsParams(regex="Q")
    num_ends = len(llm._engine.ready.eos_token_ids)
    assert len(search(llm, [PROMPT], BeamSearchParams(num_ends, 8, structured_outputs=one))[0]) == num_ends
    with pytest.raises(InvalidRequestError, match=f"allows {num_ends} outputs .* fewer than the 5 beams") as error:
        search(llm, [PROMPT], BeamSearchParams(5, 8, structured_outputs=one))
    assert error.value.param == "structured_outputs"
    assert llm.kv_stats().used_blocks == 0


def test_parameters_of_a_search_check_its_grammar(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos must be False"):
        BeamSearchParams(2, 5, ignore_eos=True, structured_outputs=CHOICES)
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        BeamSearchParams(2, 5, structured_outputs=7)  # type: ignore[arg-type]
    given = {"choice": ["a", "b"]}
    assert BeamSearchParams(2, 5, structured_outputs=given).structured_outputs == StructuredOutputsParams(**given)  # type: ignore[arg-type]
    broken = StructuredOutputsParams(grammar="start: unknown_rule")
    with pytest.raises(InvalidRequestError, match="unknown_rule"):
        search(llm, [PROMPT], BeamSearchParams(2, 5, structured_outputs=broken))
