"""Models through transformers: outputs against transformers, bits alone, batched, chunked and preempted, refusals."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ModelError
from quire.engine.options import EngineOptions
from quire.engine.transformers_model.attention_hook import GatedFeedForward, Layer, NormPart, Trace, marker
from quire.engine.transformers_model.transformers_loading import (
    TransformersModel,
    knows,
    load_through_transformers,
    try_rows,
)
from quire.model.architectures import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 160, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 24}
CASES: dict[str, dict[str, Any]] = {  # keyed by model type, with what differs from the sizes above
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cwm": WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ernie4_5": {},
    "exaone4": WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "glm": {"partial_rotary_factor": 0.5},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jais2": {},
    "ministral": WINDOW,
    "nemotron": {"partial_rotary_factor": 0.5},
    "persimmon": {"num_key_value_heads": 4},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "seed_oss": {},
    "starcoder2": WINDOW,
    "vaultgemma": WINDOW,
}
ROBERTA = {"pad_token_id": 1, "is_decoder": True}
OFFSET_KINDS = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text")
WHISPER = {
    "d_model": 64, "decoder_layers": 3, "encoder_layers": 3, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "is_encoder_decoder": False,
    "pad_token_id": 0, "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
PROMPTS = [[5, 9, 17, 33, 8] * 6 + [number, 3] for number in range(4)]  # with a prefix in common


def write_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Write a random model of a type of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    return folder


def generate(
    folder: Path, prompts: list[list[int]], **options: Any  # noqa: ANN401 (an option's value)
) -> list[tuple[list[int], list[float]]]:
    """Return the greedy tokens of each prompt and the logprob of each."""
    with LLM(str(folder), **({"dtype": "float32", "model_impl": "transformers"} | options)) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    found = []
    for output in outputs:
        (answer,) = output.outputs
        assert answer.logprobs is not None
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        found.append(([*answer.token_ids], [logprobs[token].logprob for token, logprobs in chosen]))
    return found


@torch.inference_mode()
def expected(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """Return transformers' likeliest tokens behind a prompt and the tokens before each, and their logprobs."""
    ids = torch.tensor([prompt + tokens[:-1]])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    best = logprobs.argmax(-1)
    return best.tolist(), logprobs.gather(1, best[:, None])[:, 0].tolist()


@pytest.mark.parametrize("kind", CASES)
def test_answers_are_those_of_transformers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, kind, **CASES[kind])
    assert AutoConfig.from_pretrained(folder).architectures[0] not in FAMILIES
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with caplog.at_level(logging.INFO):
        together = generate(folder, PROMPTS, model_impl="auto", max_num_batched_tokens=24)
    for prompt, (tokens, logprobs) in zip(PROMPTS, together, strict=True):
        best, likely = expected(model, prompt, tokens)
        assert tokens == best
        torch.testing.assert_close(logprobs, likely, rtol=0, atol=1e-4)
    assert "runs through transformers" in caplog.text
    if "the same bits" in caplog.text:
        alone = [generate(folder, [prompt], max_num_batched_tokens=512)[0] for prompt in PROMPTS[:2]]
        preempted = generate(folder, PROMPTS, num_kv_blocks=10, block_size=8, num_swap_blocks=20)
        assert [*alone, *together[2:]] == together == preempted


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_prefix_hits_change_no_bit(mode: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "glm", **CASES["glm"])
    roomy = generate(folder, PROMPTS, enable_prefix_caching=False)
    tight = {"num_kv_blocks": 14, "block_size": 8, "num_swap_blocks": 30, "preemption_mode": mode}
    assert generate(folder, PROMPTS, **tight) == roomy
    assert generate(folder, PROMPTS, block_size=8) == roomy


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_family_through_transformers_has_the_answers_of_its_own(kind: str, tmp_path: Path) -> None:
    """All parts are those of the back end but rotary tables: cosines of float32, which differ by one ulp at most."""
    folder = write_model(tmp_path, kind)
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(
        generate(folder, PROMPTS), generate(folder, PROMPTS, model_impl="quire"), strict=True
    ):
        assert tokens == own_tokens
        assert logprobs == pytest.approx(own_logprobs, rel=0, abs=2e-6)


def test_parts_with_the_code_of_known_ones_are_replaced(tmp_path: Path) -> None:
    loaded = load_through_transformers(EngineOptions(dtype="float32"), write_model(tmp_path, "qwen3"))
    model = loaded.model
    assert isinstance(model, TransformersModel)
    kinds = {type(module) for module in model.body.modules()}
    assert {Layer, NormPart, GatedFeedForward} <= kinds
    assert not {kind for kind in kinds if kind.__name__ in ("Linear", "Qwen3RMSNorm", "Qwen3MLP", "SiLU")}
    assert loaded.limits.max_position_embeddings == 160
    assert model.kv_geometry.num_layers == 3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_quantized_while_they_are_replaced(quantization: str, tmp_path: Path) -> None:
    """Rows keep their bits, and so do answers whatever else runs; the first logprob stays near that of floats."""
    folder = write_model(tmp_path, "arcee")
    settings = {"quantization": quantization, "quantization_group_size": 32}
    together = generate(folder, PROMPTS, **settings)
    assert together[1] == generate(folder, PROMPTS[1:2], **settings)[0]
    bytes_of = {
        name: load_through_transformers(EngineOptions(dtype="float32", **given), folder).model.weight_bytes
        for name, given in (("floats", {}), ("quantized", settings))
    }
    assert bytes_of["quantized"] < bytes_of["floats"] / 2


def test_bfloat16_error_is_at_most_that_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "starcoder2", **CASES["starcoder2"])
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    for prompt, (tokens, logprobs) in zip(PROMPTS, generate(folder, PROMPTS, dtype="bfloat16"), strict=True):
        ids, chosen = torch.tensor([prompt + tokens[:-1]]), torch.tensor(tokens)[:, None]
        with torch.inference_mode():
            true, theirs = (
                model(input_ids=ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1).gather(1, chosen)[:, 0]
                for model in (exact, rounded)
            )
        errors["ours"] += (torch.tensor(logprobs) - true).square().tolist()
        errors["theirs"] += (theirs - true).square().tolist()
    assert sum(errors["ours"]) <= 1.44 * sum(errors["theirs"])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bloom", {}, "no attention hook"),
        ("mamba", {}, "recurrent state"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "3 layers call the attention hook 1 times"),
        ("phi", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "num_local_experts 4: experts"),
        *((kind, ROBERTA, "positions that it counts itself do not begin at 0") for kind in OFFSET_KINDS),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "does not run here: AttributeError.*'decoder'"),
        ("whisper", WHISPER | {"max_position_embeddings": None}, "none of max_position_embeddings"),
        ("whisper", WHISPER, "does not run here: AttributeError"),
        ("hunyuan_v1_moe", {"num_experts": 1, "eod_token_id": 3}, "does not run here: AttributeError.*'weight'"),
        ("arcee", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "not finite"),
    ],
)
def test_model_that_a_paged_cache_cannot_serve_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, kind, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_through_transformers(EngineOptions(dtype="float32"), folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / 'config.json'}: ")
    assert "\n" not in text


@pytest.mark.parametrize("counted", ["from 1", "without padding"])
def test_positions_that_any_model_counts_by_itself_are_compared_with_those_given(counted: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "bert", pad_token_id=3, is_decoder=True)
    model = load_through_transformers(EngineOptions(dtype="float32"), folder).model
    assert isinstance(model, TransformersModel)

    def count(_: torch.nn.Module, args: tuple[object, ...], given: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        if given["position_ids"] is None:
            is_padding = given["input_ids"] == 3
            own = torch.arange(is_padding.shape[1])[None] + 1
            given["position_ids"] = own if counted == "from 1" else own - 1 - is_padding.cumsum(1)
        return args, given

    try_rows(model, "a folder")
    model.body.register_forward_pre_hook(count, with_kwargs=True)
    with pytest.raises(ModelError, match="positions that it counts itself"):
        try_rows(model, "a folder")


def test_epsilon_of_0_is_that_of_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "arcee", rms_norm_eps=0.0)
    ((tokens, logprobs),) = generate(folder, PROMPTS[:1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    best, likely = expected(model, PROMPTS[0], tokens)
    assert tokens == best
    torch.testing.assert_close(logprobs, likely, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "enable_lora True"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype 'int8_per_token_head'"),
        ({"runner": "pooling"}, "runner 'pooling'"),
        ({"hf_overrides": '{"is_matryoshka": true}'}, "hf_overrides '{"),
        ({"speculative_config": json.dumps({"model": "x"})}, "with a draft model"),
    ],
)
def test_option_without_support_is_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "arcee")
    with pytest.raises(ConfigError, match=f"{message}.*not supported for a model through transformers"):
        load_through_transformers(EngineOptions(**options), folder)


def test_attention_that_looks_ahead_is_refused_by_name() -> None:
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match="bidirectional"):
        Trace().attend(torch.nn.Module(), heads, heads, heads, marker(None), {"is_causal": False})


def test_ranks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: not supported for a model through transformers"):
        EngineOptions(model_impl="transformers", tensor_parallel_size=2)


def test_speculation_changes_no_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "arcee")
    plain = generate(folder, PROMPTS)
    assert generate(folder, PROMPTS, spec_method="ngram", spec_tokens=3) == plain


def test_config_that_names_nothing_of_transformers_is_left_to_the_families(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "arcee")
    assert knows(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    assert not knows(folder)
    with pytest.raises(ModelError, match="unknown architecture 'NoSuchModel'"):
        LLM(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="unknown architecture 'ArceeForCausalLM'"):
        LLM(str(folder), model_impl="quire")


def test_code_of_a_model_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "arcee")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="transformers cannot read it"):
        load_through_transformers(EngineOptions(), folder)
    assert not (tmp_path / "ran").exists()


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path, "arcee")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors: model.layers.1.mlp.up_proj.weight"):
        load_through_transformers(EngineOptions(), folder)
