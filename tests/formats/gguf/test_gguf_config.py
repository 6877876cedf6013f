"""GGUF files of every family: unquantized ones equal their folders to the bit, and what is wrong is named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelError
from quire.engine.formats import read_source
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_weights import RESIDENT_BYTES, GGUFCheckpoint, stored_rows
from quire.kernels.back_end import BackEnd
from quire.model.loader import load_model
from support.gguf_files import NAMES, Stored, as_is, convert, converted, write_gguf
from support.random_folder import write_random_folder

WIDE = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
}  # fmt: skip
WITHOUT_RMS = {key: value for key, value in WIDE.items() if key != "rms_norm_eps"}
FALCON = WITHOUT_RMS | {"architectures": ["FalconForCausalLM"], "layer_norm_epsilon": 1e-5, "intermediate_size": 192}
GEMMA4 = WIDE | {
    "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "global_head_dim": 32, "sliding_window": 11,
    "num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 300.0},
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"architectures": ["LlamaForCausalLM"]},
    "llama, biases, own head width, tied": WIDE
    | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "head_dim": 16}
    | {"tie_word_embeddings": True},
    "mistral": WIDE | {"architectures": ["MistralForCausalLM"], "sliding_window": 11},
    "qwen2": WIDE | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": WIDE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rms_norm_eps": 1e-6},
    "granite": WIDE
    | {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0, "residual_multiplier": 0.5}
    | {"attention_multiplier": 0.25, "logits_scaling": 2.0},
    "granite, no multipliers": WIDE | {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 8**-0.5},
    "olmo2": WIDE | {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3, types of layers, scaled": WIDE
    | {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 11}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25,
    }},
    "olmo3, bases of rotary embeddings": WIDE
    | {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 5, "sliding_window": 11, "rope_parameters": {
        "full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 300.0},
    }},
    "mistral3": WIDE | {"architectures": ["Ministral3ForCausalLM"], "head_dim": 16},
    "mistral3, scaled": WIDE
    | {"architectures": ["Ministral3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }},
    "phi3, longrope": WIDE
    | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5, "max_position_embeddings": 2**18}
    | {"original_max_position_embeddings": 256, "rope_scaling": {  # factor on cosines: 1.5, as 2**18 / 256 is 256**1.25
        "rope_type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [2.0, 3.5],
    }},
    "phi3": WIDE | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5, "sliding_window": 11},
    "gemma2": WIDE
    | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16},
    "gemma": WIDE | {"architectures": ["GemmaForCausalLM"], "head_dim": 16},
    "gemma3": WIDE
    | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16}
    | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma3, own base of windowed layers": WIDE
    | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16}
    | {"num_hidden_layers": 6, "rope_local_base_freq": 300.0},
    "gemma4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 9.0},
    "gemma4, caches of earlier layers, embeddings by layer": GEMMA4
    | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
    | {"vocab_size_per_layer_input": 96},
    "gemma4, experts": GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4}
    | {"top_k_experts": 2, "moe_intermediate_size": 40},
    "glm4": WIDE | {"architectures": ["Glm4ForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4, no biases": WIDE
    | {"architectures": ["Glm4ForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False},
    "command-r": WITHOUT_RMS | {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-3, "logit_scale": 0.5},
    "command-r, norms by head": WITHOUT_RMS
    | {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": WITHOUT_RMS
    | {"architectures": ["Cohere2ForCausalLM"], "layer_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": 11}
    | {"num_hidden_layers": 5},
    "stablelm": WITHOUT_RMS
    | {"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    "stablelm, parallel, biases, norms by head": WITHOUT_RMS
    | {"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5}
    | {"use_qkv_bias": True, "use_parallel_residual": True, "qk_layernorm": True},
    "falcon": FALCON | {"multi_query": True, "num_key_value_heads": 1, "num_kv_heads": 1},
    "falcon, new architecture": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_key_value_heads": 2},
    "falcon, new architecture, one norm, untied": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_key_value_heads": 3}
    | {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    "gptneox": WITHOUT_RMS
    | {"architectures": ["GPTNeoXForCausalLM"], "layer_norm_eps": 1e-5, "num_key_value_heads": 6}
    | {"partial_rotary_factor": 0.25},
    "gptneox, one sublayer after the other": WITHOUT_RMS
    | {"architectures": ["GPTNeoXForCausalLM"], "layer_norm_eps": 1e-3, "num_key_value_heads": 6}
    | {"partial_rotary_factor": 0.5, "use_parallel_residual": False},
    "olmo": WITHOUT_RMS | {"architectures": ["OlmoForCausalLM"], "clip_qkv": 0.75, "layer_norm_eps": 1e-5},
    "smollm3": WIDE | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5},
    "gpt-oss": WIDE
    | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}
    | {"head_dim": 16, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 32,
    }},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 6,
        "n_positions": 64, "n_inner": 72, "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip
OF_FILE: dict[str, dict[str, Any]] = {
    "granite": {
        "granite.embedding_scale": 12.0, "granite.residual_scale": 0.5, "granite.attention.scale": 0.25,
        "granite.logit_scale": 2.0,
    },
    "phi3": {"phi3.rope.dimension_count": 4},
    "phi3, longrope": {"phi3.rope.scaling.attn_factor": 1.5, "phi3.attention.sliding_window": 0},
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 4.0},
    "gemma3, own base of windowed layers": {
        "gemma3.attention.sliding_window_pattern": 6, "gemma3.rope.freq_base_swa": 300.0,
    },
    "command-r": {"command-r.rope.scaling.type": "none"},
    "stablelm": {"stablelm.use_parallel_residual": True},  # as the converter writes where the config does not say
    "gptneox, one sublayer after the other": {"gptneox.use_parallel_residual": False},
    "olmo": {"olmo.attention.clamp_kqv": 0.75},
    "gpt-oss": {"gpt-oss.expert_feed_forward_length": 80},
    "gemma2": {
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    },
}  # fmt: skip
PROMPT = torch.arange(40).tolist()


def logits_of(path: Path, back_end: BackEnd, runner: Callable[..., Any], **options: Any) -> Tensor:  # noqa: ANN401
    return runner(load_model(read_source(path), back_end=back_end, **options)).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_unquantized_file_equals_its_folder_to_the_bit(
    family: str, dtype: torch.dtype, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS[family], dtype)
    if family.startswith("gemma"):  # norms of few bits: none is lost when 1 is added and taken off
        tensors = load_file(folder / "model.safetensors")
        rounded = {name: each.bfloat16().to(dtype) if each.dim() == 1 else each for name, each in tensors.items()}
        save_file(rounded, folder / "model.safetensors")
    file = convert(folder, tmp_path / "model.gguf", **OF_FILE.get(family, {}))
    source, expected = read_source(file), read_source(folder)
    assert source.dtype() == expected.dtype() == str(dtype).removeprefix("torch.")
    assert (source.spec.norm_eps, source.spec.rotary) == (expected.spec.norm_eps, expected.spec.rotary)
    ours = logits_of(file, back_end, paged_runner)
    assert torch.equal(ours, logits_of(folder, back_end, paged_runner))


def test_dtype_is_that_of_most_elements(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["gpt2"], torch.float16)

    def with_float_positions(name: str, tensor: Tensor) -> Stored:
        return as_is(name, tensor.float() if name == "position_embd.weight" else tensor)

    assert read_source(convert(folder, tmp_path / "a.gguf", with_float_positions)).dtype() == "float16"
    assert read_source(tmp_path / "a.gguf").dtype("float32") == "float32"


def test_every_tensor_is_used_and_counted(
    tmp_path: Path, back_end: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["qwen3"])
    theirs = load_model(folder, back_end=back_end)
    ours = load_model(read_source(convert(folder, tmp_path / "model.gguf")), back_end=back_end)
    assert (ours.num_parameters, ours.weight_bytes) == (theirs.num_parameters, theirs.weight_bytes)
    assert not caplog.records


@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
            | {"llama.rope.scaling.original_context_length": 32},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
            | {"llama.rope.scaling.yarn_beta_fast": 8.0, "llama.rope.scaling.yarn_beta_slow": 2.0},
        ),
        ({"rope_type": "linear", "factor": 2.5}, {"llama.rope.scaling.type": "linear"}
         | {"llama.rope.scaling.factor": 2.5}),
        ({"rope_type": "linear", "factor": 2.5}, {"llama.rope.scale_linear": 2.5}),
        ({"rope_type": "default"}, {"llama.rope.scaling.type": "none"}),
    ],
)
def test_rope_scalings_are_those_of_the_config(
    tmp_path: Path, scaling: dict[str, Any], metadata: dict[str, Any]
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["llama"] | {"rope_scaling": scaling})
    file = convert(folder, tmp_path / "model.gguf", **metadata)
    assert read_source(file).spec.rotary == read_source(folder).spec.rotary


def test_llama3_rope_as_a_tensor_of_divisors_gives_the_frequencies_but_for_rounding(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    config = CONFIGS["llama"] | {"rope_theta": 20.0, "rope_scaling": scaling}
    folder = write_random_folder(tmp_path / "model", config)
    kept = 1.0 / 20.0 ** (torch.arange(0, 8, 2) / 8)
    waves = 2 * torch.pi / kept
    smooth = (32 / waves - 1) / 3
    divisors = torch.where(waves < 8, 1.0, torch.where(waves > 32, 8.0, 1 / ((1 - smooth) / 8 + smooth)))
    assert len(set(divisors.tolist())) > 2
    plain = convert(folder, tmp_path / "plain.gguf")
    entries = GGUFFile(plain)
    tensors = {
        name: (entry.type.name, entry.shape, entries.map[entry.offset : entry.offset + entry.num_bytes])
        for name, entry in entries.tensors.items()
    }
    metadata = {key: value for key, value in entries.metadata.items() if isinstance(value, int | float | str)}
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors | {"rope_freqs.weight": as_is("", divisors)})
    ours, theirs = (logits_of(path, back_end, paged_runner) for path in (file, folder))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(plain, back_end, paged_runner), theirs, rtol=1e-2, atol=1e-2)


def test_rows_in_ranges_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["llama"])
    path = convert(folder, tmp_path / "model.gguf")
    checkpoint = GGUFCheckpoint(GGUFFile(path), {"blk.0.attn_q.weight": 8})
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "output_norm.weight"):
        whole = checkpoint.read(name, 0, checkpoint.shape(name)[0])
        assert whole.shape == checkpoint.shape(name)
        cut = [checkpoint.read(name, start, min(start + 7, len(whole))) for start in range(0, len(whole), 7)]
        np.testing.assert_array_equal(np.concatenate(cut), whole)


def test_stored_rows_undo_the_layout_of_heads() -> None:
    heads = np.arange(3 * 12)
    stored = heads.reshape(3, 2, 6).transpose(0, 2, 1).ravel()  # as the converter moves rows
    np.testing.assert_array_equal(stored[stored_rows(heads, 12)], heads)


def test_pages_are_dropped_while_tensors_stay_right(tmp_path: Path) -> None:
    rows = torch.arange(1 << 18, dtype=torch.float32).view(1 << 8, 1 << 10)
    path = write_gguf(tmp_path / "model.gguf", {}, {"a": as_is("a", rows)})
    checkpoint = GGUFCheckpoint(GGUFFile(path), {})
    kept = checkpoint.read("a", 0, 1 << 8)
    for _ in range(RESIDENT_BYTES // rows.nbytes + 2):
        np.testing.assert_array_equal(checkpoint.read("a", 0, 1 << 8), rows)
    np.testing.assert_array_equal(kept, rows)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "bert"}, "general.architecture must be one of llama, qwen2, .*gpt2"),
    "no architecture": ({"general.architecture": None}, r"general.architecture must be one of .*, got None"),
    "missing": ({"llama.block_count": None}, "llama.block_count is missing"),
    "of a wrong type": ({"llama.embedding_length": "48"}, "llama.embedding_length must be an integer from 1 to"),
    "an array": ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv must be an integer .*, got an array of 2"),
    "too many layers": ({"llama.block_count": 10**6}, "llama.block_count must be an integer from 1 to 4096"),
    "zero": ({"llama.attention.head_count": 0}, "llama.attention.head_count must be an integer from 1"),
    "not a number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon must be a num"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    "experts in groups": ({"llama.expert_group_count": 8}, "llama.expert_group_count = 8 is not supported yet"),
    "part of a head turned": ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 is not supported"),
    "not causal": ({"llama.attention.causal": False}, "llama.attention.causal = False is not supported yet"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be one of none, linear, yarn"),
    "one of several parts": ({"split.count": 3}, "is one of 3 parts of a model; llama-gguf-split --merge"),
    "other sizes": ({"llama.feed_forward_length": 64}, r"tensor blk.0.ffn_gate.weight has shape \[80, 48\], expected"),
    "end": ({"tokenizer.ggml.eos_token_id": 96}, "tokenizer.ggml.eos_token_id must be an integer from 0 to 95"),
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmo2", {"olmo2.attention.sliding_window": 11, "olmo2.attention.sliding_window_pattern": [True]},
         "attention.sliding_window_pattern must be a list of 2 times 0 or 1, got 1 items"),
        ("mistral3", {"mistral3.attention.sliding_window": 11}, "sliding_window = 11 is not supported yet"),
        ("llama", {"llama.attention.temperature_scale": 0.1}, "temperature_scale = 0.1 is not supported yet"),
        ("llama", {"llama.rope.scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor = 1.5 is not supported yet: the sca"),
        ("olmo2", {"olmo2.attention.clamp_kqv": 2.0}, "clamp_kqv = 2.0 is not supported yet"),
        ("llama", {"llama.embedding_scale": 2.0}, "embedding_scale = 2.0 is not supported yet"),
        ("gemma2", {"gemma2.attn_logit_softcapping": None}, "attn_logit_softcapping is missing"),
        ("phi3", {"phi3.rope.dimension_count": 9}, "rope.dimension_count must be an integer from 1 to 8"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 5}, "sliding_window_pattern = 5 is not supported yet"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported yet"),
        ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06 is not supported yet"),
        ("stablelm", {"stablelm.logit_scale": 2.0}, "logit_scale = 2.0 is not supported yet"),
        ("command-r", {"command-r.logit_scale": None}, "command-r.logit_scale is missing"),
        ("gemma4", {"gemma4.attention.value_length": 16}, "value_length = 16 is not supported yet: it must be the hea"),
        ("gemma4", {"gemma4.attention.shared_kv_layers": 4}, "shared_kv_layers must be an integer from 0 to 3, got 4"),
        ("gemma4", {"gemma4.feed_forward_length": [80, 80, 80, 160]}, "feed_forward_length must be one number, or tw"),
        ("gpt-oss", {"gpt-oss.expert_count": None}, "gpt-oss.expert_count is missing"),
    ],
)
def test_what_an_architecture_does_not_read_is_refused(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS[family])
    path = convert(folder, tmp_path / "model.gguf", **(OF_FILE.get(family, {}) | changes))
    with pytest.raises(ModelError, match=words):
        read_source(path)


def test_longrope_of_long_sequences_is_that_of_the_folder(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["phi3, longrope"])
    file = convert(folder, tmp_path / "model.gguf", **OF_FILE["phi3, longrope"])
    found = {
        length: [logits_of(path, back_end, paged_runner, max_positions=length) for path in (file, folder)]
        for length in (256, 300)
    }
    assert all(torch.equal(ours, theirs) for ours, theirs in found.values())
    assert not torch.allclose(found[256][0], found[300][0])


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"long": torch.ones(2)}, r"tensor rope_factors_short\.weight is missing"),
        ({"long": torch.ones(2), "short": torch.ones(3)}, r"rope_factors_short\.weight must be F32 of shape \[2\]"),
        ({"long": torch.ones(2), "short": torch.zeros(2)}, r"rope_factors_short\.weight has values that are not above"),
    ],
    ids=["missing", "too many", "zero"],
)
def test_longrope_without_its_factors_is_refused(factors: dict[str, Tensor], words: str, tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["phi3"])
    metadata, tensors = converted(folder, **OF_FILE["phi3"])
    stored = {f"rope_factors_{kind}.weight": as_is("", values) for kind, values in factors.items()}
    with pytest.raises(ModelError, match=words):
        read_source(write_gguf(tmp_path / "model.gguf", metadata, tensors | stored))


@pytest.mark.parametrize("kind", BROKEN)
def test_metadata_that_makes_no_model_is_refused_by_key(kind: str, tmp_path: Path, back_end: BackEnd) -> None:
    changes, words = BROKEN[kind]
    folder = write_random_folder(tmp_path / "model", CONFIGS["llama"])
    path = convert(folder, tmp_path / "model.gguf", **changes)

    def load() -> None:
        load_model(read_source(path), back_end=back_end)
        read_source(path).eos_token_ids()

    with pytest.raises(ModelError, match=words) as error:
        load()
    assert str(path) in str(error.value)


def test_missing_or_unsupported_tensor_is_named(tmp_path: Path, back_end: BackEnd) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["llama"])

    def spoil(name: str, tensor: Tensor) -> Any:  # noqa: ANN401
        if name == "blk.1.attn_v.weight":
            return "I16", tuple(tensor.shape), bytes(2 * tensor.numel())
        return as_is(name, tensor)

    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_v\.weight has dtype I16"):
        load_model(read_source(convert(folder, tmp_path / "model.gguf", spoil)), back_end=back_end)
    path = convert(folder, tmp_path / "other.gguf")
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"token_ambd.weight"))
    with pytest.raises(ModelError, match=r"other.gguf: tensor token_embd\.weight is missing"):
        load_model(read_source(path), back_end=back_end)


def test_names_of_later_blocks_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3)
    modules = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    assert [theirs.get_name(f"model.layers.2.{module}") for module in modules] == [
        f"blk.2.{NAMES[module]}" for module in modules
    ]


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "mistral"])
def test_names_are_those_of_the_gguf_package(family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = write_random_folder(tmp_path / "model", CONFIGS[family])
    metadata, tensors = converted(folder, **OF_FILE.get(family, {}))
    ids = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(ids[metadata["general.architecture"]], 8)
    expected = set()
    for name in load_file(folder / "model.safetensors"):
        merged = re.sub(r"\.norms\.\d+|(?<=\.experts)\.\d+", "", name)  # one tensor of all heads, or of all experts
        if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale\.weight|per_expert_scale)", name):
            expected.add(f"blk.{found[1]}.{'ffn_gate_inp' if found[2].startswith('scale') else 'ffn_down_exps'}.scale")
            continue
        merged = f"{merged}.weight" if name.endswith(("sinks", "layer_scalar")) else merged
        if family.startswith("gemma4"):
            merged = re.sub(r"experts\.(gate|up)_proj", "experts.gate_up_proj", merged)
        expected.add(theirs.get_name(merged, try_suffixes=(".weight", ".bias")))
    if family.startswith("gemma4"):
        expected.add(f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight")
    if "longrope" in family:
        factors = gguf.MODEL_TENSOR.ROPE_FACTORS_LONG, gguf.MODEL_TENSOR.ROPE_FACTORS_SHORT
        expected |= {f"{gguf.TENSOR_NAMES[each]}.weight" for each in factors}
    assert set(tensors) == expected
