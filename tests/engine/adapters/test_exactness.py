"""Adapters change no bit of other rows: tokens and logprobs alone, and beside requests of others and of none."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from support.peft_folders import write_adapter
from support.random_folder import write_random_folder
from support.random_model import VOCAB_SIZE, write_random_model

GENERATOR = torch.Generator().manual_seed(1)
PREFIX = torch.randint(VOCAB_SIZE, (48,), generator=GENERATOR).tolist()
PROMPTS = [PREFIX + torch.randint(VOCAB_SIZE, (n,), generator=GENERATOR).tolist() for n in (1, 9, 30, 5, 17, 2)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=1, ignore_eos=True)
ASKED = [None, "a", "b", "c", "a", None]  # the adapter of each prompt
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "quantization_group_size": 32},
    "int4": {"dtype": "float32", "quantization": "int4", "quantization_group_size": 32},
    "int4, expanded": {
        "dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 32,
        "quantization_activations": "bfloat16",
    },
    "cache of 8 bits": {"dtype": "bfloat16", "kv_cache_dtype": "int8_per_token_head"},
    "n-gram drafts": {"dtype": "float32", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "suffix drafts": {"dtype": "float32", "speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
}  # fmt: skip

MIXTURE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model."""
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    """Write three adapters: of all modules, of some of each fused layer, and with ranks by module."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", model, 1)
    write_adapter(folder / "b", model, 2, targets=("k_proj", "up_proj"), rank=3, lora_alpha=7)
    write_adapter(folder / "c", model, 3, rank=16, ranks={"q_proj": 5, "down_proj": 1}, use_rslora=True)
    return {name: LoRARequest(name, number, str(folder / name)) for number, name in enumerate("abc", 1)}


def found(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and logprobs of each output."""
    rows = []
    for output in outputs:
        (answer,) = output.outputs
        assert answer.logprobs is not None
        each = zip(answer.logprobs, answer.token_ids, strict=True)
        rows.append((answer.token_ids, [position[token].logprob for position, token in each]))
    return rows


def check_mixed_batch(model: Path, adapters: dict[str, LoRARequest], settings: dict[str, Any]) -> None:
    """Prompts begin alike, so a prefix that crossed adapters would show, too: some in memory, some evicted."""
    asked = [None if each is None else adapters[each] for each in ASKED]
    with LLM(model, enable_lora=True, max_num_batched_tokens=40, **settings) as llm:
        mixed = found(llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=asked))
    with LLM(model, enable_lora=True, enable_prefix_caching=False, max_loras=1, **settings) as llm:
        alone = [
            found(llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=own))[0]
            for prompt, own in zip(PROMPTS, asked, strict=True)
        ]
    assert mixed == alone
    with LLM(model, **settings) as llm:
        plain = found(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert [own == without for own, without in zip(mixed, plain, strict=True)] == [each is None for each in ASKED]


@pytest.mark.parametrize("name", SETTINGS)
def test_mixed_batch_has_the_bits_of_each_request_alone(
    name: str, model: Path, adapters: dict[str, LoRARequest]
) -> None:
    check_mixed_batch(model, adapters, SETTINGS[name])


@pytest.mark.parametrize("name", ["int8", "int4", "int4, expanded"])
def test_mixed_batch_over_quantized_experts_has_the_bits_of_each_request_alone(name: str, tmp_path: Path) -> None:
    model = write_random_folder(tmp_path / "model", MIXTURE)
    targets = {"a": ("q_proj", "k_proj", "v_proj", "o_proj"), "b": ("v_proj",), "c": ("q_proj", "o_proj")}
    adapters = {
        each: LoRARequest(each, number, str(write_adapter(tmp_path / each, model, number, targets=own)))
        for number, (each, own) in enumerate(targets.items(), 1)
    }
    check_mixed_batch(model, adapters, SETTINGS[name])


def test_kernels_of_pytorch_serve_adapters(
    model: Path, adapters: dict[str, LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [None if each is None else adapters[each] for each in ASKED]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def tokens() -> list[list[int]]:
        with LLM(model, enable_lora=True, dtype="float32") as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=asked)
            return [output.outputs[0].token_ids for output in outputs]

    expected = tokens()
    monkeypatch.setattr("quire.kernels.choice.usable_isas", lambda: ())
    assert tokens() == expected


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """Start an engine that caches prefixes."""
    with LLM(model, dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=16) as engine:
        yield engine


def test_prefix_cache_never_crosses_adapters(llm: LLM, adapters: dict[str, LoRARequest], tmp_path: Path) -> None:
    """Adapters are told apart by the content of their files, not by name or number."""
    params = SamplingParams(max_tokens=1, temperature=0)

    def num_cached(lora_request: LoRARequest | None) -> int:
        (output,) = llm.generate([PREFIX], params, use_tqdm=False, lora_request=lora_request)
        return output.num_cached_tokens or 0

    assert num_cached(None) == 0
    assert num_cached(adapters["a"]) == 0
    assert num_cached(adapters["b"]) == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(adapters["a"].lora_path).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    again = [num_cached(each) for each in (None, adapters["a"], LoRARequest("other", 99, str(copy)))]
    assert min(again) >= 32, "its own content is found"
    renamed = LoRARequest("a", 1, adapters["c"].lora_path)
    assert num_cached(renamed) == 0


def test_branches_beams_and_embeddings_of_an_adapter(llm: LLM, adapters: dict[str, LoRARequest]) -> None:
    own = adapters["a"]
    (branches,) = llm.generate(
        [PREFIX], SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True), use_tqdm=False, lora_request=own
    )
    assert len({tuple(each.token_ids) for each in branches.outputs}) > 1
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    (searched,) = llm.beam_search([PREFIX], beams, use_tqdm=False, lora_request=own)
    (plain,) = llm.beam_search([PREFIX], beams, use_tqdm=False)
    assert [each.token_ids for each in searched.outputs] != [each.token_ids for each in plain.outputs]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("name", ["float32", "int4"])
def test_draft_model_proposes_and_the_adapted_model_decides(
    name: str, temperature: float, model: Path, adapters: dict[str, LoRARequest]
) -> None:
    """The draft model is the model itself, without the adapter."""
    asked = [None if each is None else adapters[each] for each in ASKED]
    params = replace(PARAMS, temperature=temperature)
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    outputs = []
    for config in (None, speculation):
        with LLM(model, enable_lora=True, speculative_config=config, **SETTINGS[name]) as engine:
            outputs.append(found(engine.generate(PROMPTS, params, use_tqdm=False, lora_request=asked)))
    assert outputs[0] == outputs[1]
