"""Arithmetics of quantized files, beside llama.cpp on the same file and text.

What an arithmetic costs is its divergence from the numbers that the file stands for, computed in float32. llama.cpp
rounds activations to 8 bits in groups of 32 inputs (Q4_1) or 256 (Q4_K_M), Quire in groups of 32 and 16; what it
computes in bfloat16 beside that, llama.cpp keeps in float32.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.formats import load_tokenizer
from support.llama_cpp import LlamaCpp
from support.real_text import prose
from support.threads import set_num_threads
from support.whole_logits import divergences, load_model, losses, whole_logits

pytestmark = pytest.mark.real

NUM_TOKENS = {"SmolLM2": 512, "gemma-3": 256}  # the vocabulary of Gemma has 262,144 tokens
EXACT = {"dtype": "float32", "quantization_activations": "bfloat16"}
ARITHMETICS: Mapping[str, dict[str, Any]] = {
    "as in the file": {},
    "float32": {"dtype": "float32"},
    "expanded": {"quantization_activations": "bfloat16"},
}
# Most that a mean divergence may be, as a share of llama.cpp's. Measured on Zen 4: 1.21, 1.01, 0.20; 0.48, 0.38, 0.11.
SHARES = {
    "SmolLM2": {"as in the file": 1.35, "float32": 1.1, "expanded": 0.3},
    "gemma-3": {"as in the file": 0.6, "float32": 0.5, "expanded": 0.2},
}
# Most nats per token from float32, of SmolLM2 in bfloat16.
QUALITIES: Mapping[str, tuple[dict[str, Any], float]] = {
    "KV cache in int8": ({"kv_cache_dtype": "int8_per_token_head", "quantization_activations": "bfloat16"}, 0.003),
    "KV cache in fp8": ({"kv_cache_dtype": "fp8_per_token_head", "quantization_activations": "bfloat16"}, 0.01),
    "int8": ({"quantization": "int8"}, 0.02),
    "int8, groups of 32": ({"quantization": "int8", "quantization_group_size": 32}, 0.0065),
    "int4": ({"quantization": "int4"}, 0.6),
    "int4, groups of 32": ({"quantization": "int4", "quantization_group_size": 32}, 0.35),
}
PROMPTS = (
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "Paper is made of", "In 1969,", "1, 2, 3, 4,",
    "Dear Sir or Madam,", "The cat sat on the", "To be, or not to be,", "La maison est", "Es war einmal", "Q: Why?\nA:",
)  # fmt: skip
ANSWER_LEN = 48


class Measured(NamedTuple):
    """Logits [length, vocab_size] of a text's tokens: those of float32, and llama.cpp's of the file."""

    ids: list[int]
    exact: Tensor
    theirs: Tensor

    def gap_error(self, found: Tensor) -> float:
        """Return the largest change of the gap between the two tokens that are likeliest in float32."""
        pairs = self.exact.topk(2).indices
        gaps = (logits.gather(1, pairs).diff(dim=-1) for logits in (self.exact, found))
        before, after = gaps
        return float((before - after).abs().max())


@pytest.fixture(scope="module", autouse=True)
def _whole_sums() -> Any:  # noqa: ANN401
    """Use one thread, as llama.cpp does here."""
    before = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


def family(model: Path) -> str:
    return next(name for name in NUM_TOKENS if model.name.startswith(name))


@pytest.fixture(scope="module")
def measured(model: Path, llama_cpp: LlamaCpp) -> Measured:
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    ids = tokenizer.encode(prose(8_000))[: NUM_TOKENS[family(model)]]
    return Measured(ids, whole_logits(load_model(model, **EXACT), ids), llama_cpp.logits(ids))


def is_at_most(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the mean of `ours` is not above that of `theirs`, or by less than two standard errors."""
    excess = ours - theirs
    return bool(excess.mean() <= 2 * excess.std() / len(excess) ** 0.5)


@pytest.mark.parametrize("name", ARITHMETICS)
def test_divergence_and_perplexity_beside_llama_cpp(model: Path, measured: Measured, name: str) -> None:
    found = whole_logits(load_model(model, **ARITHMETICS[name]), measured.ids)
    ours, theirs = (divergences(measured.exact, logits) for logits in (found, measured.theirs))
    print(f"\n{model.name}, {name}: {ours.mean():.6f}, llama.cpp {theirs.mean():.6f}")
    losses_of = [losses(logits, measured.ids) for logits in (measured.exact, found, measured.theirs)]
    print("perplexity of float32, Quire, llama.cpp:", *(f"{each.mean().exp():.3f}" for each in losses_of))
    assert ours.mean() <= SHARES[family(model)][name] * theirs.mean()
    assert is_at_most(losses_of[1], losses_of[2])


@pytest.mark.parametrize("arithmetic", [{}, EXACT], ids=["as in the file", "float32"])
def test_greedy_texts_part_where_two_tokens_are_near(
    model: Path, measured: Measured, llama_cpp: LlamaCpp, arithmetic: dict[str, Any]
) -> None:
    error = measured.gap_error(measured.theirs)
    error += measured.gap_error(whole_logits(load_model(model, **arithmetic), measured.ids))
    num_equal = 0
    with LLM(model, max_model_len=256, **arithmetic) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN, ignore_eos=True)
        for output in llm.generate(list(PROMPTS), params, use_tqdm=False):
            answer = torch.tensor(output.outputs[0].token_ids)
            ids = [*output.prompt_token_ids, *answer.tolist()]
            theirs = llama_cpp.logits(ids)[len(output.prompt_token_ids) - 1 : -1]
            others = (theirs.argmax(dim=-1) != answer).nonzero()
            if not len(others):
                num_equal += 1
                continue
            place = int(others[0])
            gap = float(theirs[place].max() - theirs[place, answer[place]])
            assert gap < error, (output.prompt, place, gap, error)
    print(f"\n{model.name}: {num_equal} of {len(PROMPTS)} texts equal, gaps below {error:.2f} nats")
    assert num_equal > 0


def test_float32_is_what_the_file_stands_for(smollm2: Path, floats: Path, llama_cpp_folder: Path) -> None:
    """llama.cpp's own expansion gives the same bits; what it computes from it differs by its cache in float16."""
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    ids = tokenizer.encode(prose(3_000))[:256]
    ours, expanded = whole_logits(load_model(smollm2, **EXACT), ids), whole_logits(load_model(floats), ids)
    assert torch.equal(ours, expanded)
    with LlamaCpp(llama_cpp_folder, floats) as theirs:
        assert divergences(ours, theirs.logits(ids)).max() < 1e-4


@pytest.mark.parametrize("name", QUALITIES)
def test_quality_of_fewer_bits(smollm2: Path, floats: Path, name: str) -> None:
    options, most = QUALITIES[name]
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer is not None
    ids = tokenizer.encode(prose(8_000))[: NUM_TOKENS["SmolLM2"]]
    exact = whole_logits(load_model(floats), ids)
    model = load_model(floats if "quantization" in options else smollm2, dtype="bfloat16", **options)
    found = whole_logits(model, ids)
    print(f"\n{name}: {divergences(exact, found).mean():.5f}, perplexity {losses(found, ids).mean().exp():.2f}")
    assert divergences(exact, found).mean() < most
