"""Quantized GGUF files: layers are those of the folder with the same values to the bit, whatever types meet."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.arrays import BFLOAT16, FLOAT32, bits
from quire.core.errors import ConfigError, ModelError
from quire.engine.formats import read_source
from quire.extension.isas import usable_isas
from quire.formats.gguf import gguf_weights
from quire.formats.gguf.blocks import KINDS, read_values
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_weights import SCHEMES, GGUFCheckpoint, GGUFFormat, GGUFQuantization, block_scheme
from quire.kernels.back_end import BackEnd
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import expand
from quire.kernels.reference.linear import reference
from quire.kernels.torch_arrays import weight_of_tensors
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from quire.model.quantization import Activations, QuantizationOptions
from quire.model.sharding import Ranks
from quire.model.weight_format import ModuleRows
from quire_lab.sim.footprint import weight_bytes
from support.gguf_blocks import random_blocks, random_rows
from support.gguf_files import as_is, convert, converted, dequantized, latent_metadata, write_gguf
from support.on_tensors import linear_of
from support.random_folder import write_random_folder
from support.thread_ranks import RankDecoder, assert_ranks_have_the_bits_of_one, logits_of_ranks

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 48, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPANDED = QuantizationOptions(activations="bfloat16")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 48, "n_embd": 256, "n_layer": 1, "n_head": 8,
             "n_positions": 64},
    "command-r, norms by head": {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    | {"architectures": ["CohereForCausalLM"], "layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True},
}  # fmt: skip
LFM2 = LLAMA | {
    "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False, "rope_theta": 10000.0, "tie_word_embeddings": False,
}
CONFIGS["lfm2"] = LFM2 | {"architectures": ["Lfm2ForCausalLM"]}
EXPERTS = LLAMA | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
BIASED = LLAMA | {
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 2, "first_k_dense_replace": 0,
    "norm_topk_prob": True, "gating_func": 2,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"architectures": ["MixtralForCausalLM"], "rope_theta": 10000.0},
    "olmoe": EXPERTS | {"architectures": ["OlmoeForCausalLM"]},
    "qwen2moe": EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 512},
    "qwen3moe": EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True},
    "glm4moe": BIASED
    | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 5, "use_qk_norm": True, "attention_bias": True}
    | {"partial_rotary_factor": 0.5, "routed_scaling_factor": 1.5},
    "dots1": BIASED
    | {"architectures": ["Dots1ForCausalLM"], "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    | {"sliding_window": None, "num_key_value_heads": 8},
    "minimax-m2": EXPERTS
    | {"architectures": ["MiniMaxM2ForCausalLM"], "intermediate_size": 256, "num_local_experts": 5, "head_dim": 32}
    | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "gating_func": 2},
    "ernie4_5-moe": EXPERTS
    | {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1}
    | {"moe_layer_start_index": 0, "moe_layer_interval": 1, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "lfm2moe": LFM2
    | {"architectures": ["Lfm2MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2, "num_dense_layers": 0}
    | {"moe_intermediate_size": 256, "gating_func": 2, "routed_scaling_factor": 1.5},
    "gpt-oss": EXPERTS
    | {"architectures": ["GptOssForCausalLM"], "intermediate_size": 256, "num_local_experts": 5, "head_dim": 32}
    | {"rope_theta": 10000.0}
    | {"sliding_window": 11, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 32,
    }},
}
MIXTURES: dict[str, tuple[dict[str, str], str]] = {
    **{name: ({}, name) for name in KINDS},
    "as Q4_K_M": ({"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K"}, "Q4_K"),
    "zero points": ({"attn_k.weight": "Q6_K", "attn_v.weight": "Q8_0", "ffn_up.weight": "IQ4_NL"}, "Q5_0"),
    "codes": ({"attn_k.weight": "MXFP4", "ffn_up.weight": "MXFP4", "output.weight": "Q5_K"}, "IQ4_XS"),
    "minimums and codes that lose bits": ({"attn_v.weight": "Q5_K"}, "IQ4_XS"),
    "floats": ({"attn_v.weight": "BF16", "output.weight": "BF16", "token_embd.weight": "BF16"}, "Q4_1"),
}
PROMPT = torch.arange(30).tolist()


def logits_of(
    path: Path,
    back_end: BackEnd,
    runner: Callable[..., Any],
    asked: QuantizationOptions | None = None,
    dtype: str = "auto",
) -> Tensor:
    source = read_source(path)
    found = source.quantization(asked or QuantizationOptions())
    return runner(load_model(source, back_end=back_end, dtype=dtype, quantization=found)).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_file_with_experts_equals_the_folder_to_the_bit(
    family: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    has_vectors = family not in ("mixtral", "olmoe", "qwen2moe", "qwen3moe")
    dtype = torch.bfloat16 if has_vectors else torch.float32  # sinks and biases of a choice are not rounded
    folder = write_random_folder(tmp_path / "model", WITH_EXPERTS[family], dtype)
    floats = convert(folder, tmp_path / "floats.gguf")
    assert [name for name in GGUFFile(floats).tensors if name.startswith("blk.0.ffn_down_exps")]
    assert torch.equal(logits_of(floats, back_end, paged_runner), logits_of(folder, back_end, paged_runner))
    kinds = {f"ffn_{name}.weight": "MXFP4" for name in ("gate", "up", "down")}, "Q8_0"  # as gpt-oss is published
    blocks = random_blocks(*(kinds if family == "gpt-oss" else ({"ffn_down.weight": "Q6_K"}, "Q4_K")))
    file = convert(folder, tmp_path / "model.gguf", blocks)
    twin = dequantized(folder, file, tmp_path / "twin", torch.bfloat16)
    ours = logits_of(file, back_end, paged_runner, asked=EXPANDED)
    assert torch.equal(ours, logits_of(twin, back_end, paged_runner))
    source = read_source(file)
    decoder = load_model(source, back_end=back_end, quantization=source.quantization(QuantizationOptions()))
    if back_end.name == "cpp":
        expected = weight_bytes(source.spec, "bfloat16", quantization=source.quantization(QuantizationOptions()))
        assert decoder.weight_bytes == expected


def test_blocks_that_predict_later_tokens_are_left_out(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_random_folder(tmp_path / "model", WITH_EXPERTS["glm4moe"], torch.float32)
    metadata, tensors = converted(folder, **{"glm4moe.block_count": 2, "glm4moe.nextn_predict_layers": 1})
    tensors |= {name.replace("blk.0.", "blk.1."): stored for name, stored in tensors.items() if "blk.0." in name}
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert torch.equal(logits_of(file, back_end, paged_runner), logits_of(folder, back_end, paged_runner))
    assert "not used" not in caplog.text


LATENT = {key: value for key, value in BIASED.items() if key not in ("num_key_value_heads", "gating_func")} | {
    "n_routed_experts": 6, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}  # fmt: skip
LATENTS = {
    "v2": LATENT | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "norm_topk_prob": False},
    "v3": LATENT
    | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 64, "n_group": 3, "topk_group": 2, "gating_func": 2},
}


@pytest.mark.parametrize("is_split", [True, False], ids=["newer", "older"])
@pytest.mark.parametrize("family", LATENTS)
def test_file_with_latents_equals_the_folder_to_the_bit(
    family: str, is_split: bool, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = LATENTS[family]
    folder = write_random_folder(tmp_path / "model", config, torch.bfloat16)
    changes = latent_metadata(config, is_split=is_split) | {"deepseek2.rope.scaling.yarn_log_multiplier": 0.07}
    floats = convert(folder, tmp_path / "floats.gguf", **changes)
    assert ("blk.1.attn_k_b.weight" in GGUFFile(floats).tensors) == is_split
    assert torch.equal(logits_of(floats, back_end, paged_runner), logits_of(folder, back_end, paged_runner))
    assert "not used" not in caplog.text
    blocks = random_blocks({"attn_k_b.weight": "Q5_0", "ffn_down.weight": "Q6_K"}, "Q8_0")
    source = read_source(convert(folder, tmp_path / "model.gguf", blocks, **changes))
    quantization = source.quantization(QuantizationOptions())
    decoder = load_model(source, back_end=back_end, quantization=quantization)
    assert torch.isfinite(paged_runner(decoder).step({"a": PROMPT})["a"]).all()
    if back_end.name == "cpp":
        assert decoder.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=quantization)


KIMI = {key: value for key, value in LATENT.items() if key not in ("rope_scaling", "n_routed_experts")} | {
    "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_token": 2,
    "num_shared_experts": 1, "num_expert_group": 3, "topk_group": 2, "gating_func": 2, "model_max_length": 256,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 32,
    "linear_num_heads": LATENT["num_attention_heads"],
}  # fmt: skip


@pytest.mark.parametrize("is_quantized", [False, True], ids=["converted", "quantized"])
def test_file_of_kimi_linear_equals_the_folder(
    is_quantized: bool, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """llama.cpp's converter writes convolutions and rates in four dimensions, and its quantizer drops the first."""
    folder = write_random_folder(tmp_path / "model", KIMI, torch.float32)
    changes = latent_metadata(KIMI, is_split=True, name="kimi-linear") | {
        "kimi-linear.attention.head_count_kv": [0, 1, 0], "kimi-linear.kda.head_dim": 32,
        "kimi-linear.ssm.conv_kernel": 4,
    }
    metadata, tensors = converted(folder, **changes)
    assert [len(tensors[f"blk.0.{name}"][1]) for name in ("ssm_a", "ssm_conv1d_q.weight")] == [4, 4]
    if is_quantized:
        tensors |= {
            name: (kind, shape[shape[0] == 1 :], content) for name, (kind, shape, content) in tensors.items()
            if ".ssm_conv1d" in name
        }
        a = next(name for name in tensors if name.endswith("ssm_a"))
        tensors[a] = (tensors[a][0], tensors[a][1][2:], tensors[a][2])
    floats = write_gguf(tmp_path / "floats.gguf", metadata, tensors)
    ours, expected = (logits_of(path, back_end, paged_runner).log_softmax(dim=-1) for path in (floats, folder))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert "not used" not in caplog.text
    blocks = random_blocks({"attn_k_b.weight": "Q5_0", "ffn_down.weight": "Q6_K"}, "Q8_0")
    source = read_source(convert(folder, tmp_path / "model.gguf", blocks, **changes))
    quantization = source.quantization(QuantizationOptions())
    decoder = load_model(source, back_end=back_end, quantization=quantization)
    assert torch.isfinite(paged_runner(decoder).step({"a": PROMPT})["a"]).all()
    if back_end.name == "cpp":
        assert decoder.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=quantization)


HYBRID = LLAMA | {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
HYBRID_EXPERTS = HYBRID | {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512,
}
HYBRIDS = {
    "qwen35": HYBRID | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen35moe": HYBRID_EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "qwen3next": HYBRID_EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_file_with_delta_nets_equals_the_folder(
    family: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Sums over value heads, which are in another order in most files, may differ by their rounding."""
    folder = write_random_folder(tmp_path / "model", HYBRIDS[family], torch.bfloat16)
    metadata, tensors = converted(folder, **{f"{family}.block_count": 4, f"{family}.nextn_predict_layers": 1})
    metadata |= {f"{family}.attention.recurrent_layers": [True, False, True, False]}
    if family == "qwen35moe":
        del metadata["qwen35moe.feed_forward_length"]
    tensors |= {name.replace("blk.1.", "blk.3."): stored for name, stored in tensors.items() if "blk.1." in name}
    floats = write_gguf(tmp_path / "floats.gguf", metadata, tensors)
    ours, expected = (
        logits_of(path, back_end, paged_runner, dtype="float32").log_softmax(dim=-1) for path in (floats, folder)
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert "not used" not in caplog.text
    blocks = random_blocks({"ssm_out.weight": "Q6_K", "ssm_alpha.weight": "Q8_0", "ssm_conv1d.weight": "F32"}, "Q4_K")
    source = read_source(convert(folder, tmp_path / "model.gguf", blocks))
    quantization = source.quantization(QuantizationOptions())
    decoder = load_model(source, back_end=back_end, quantization=quantization)
    assert torch.isfinite(paged_runner(decoder).step({"a": PROMPT})["a"]).all()
    if back_end.name == "cpp":
        assert decoder.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=quantization)


MAMBA = LLAMA | {
    "num_hidden_layers": 4, "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32,
    "mamba_d_conv": 4,
}  # fmt: skip
GRANITE_H = MAMBA | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 512, "num_local_experts": 0, "attention_multiplier": 0.5, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.25, "logits_scaling": 2.0,
}  # fmt: skip
NEMOTRON_H = LLAMA | {
    "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M",
    "head_dim": 32, "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
MAMBAS = {
    "granitehybrid": GRANITE_H,
    "granitehybrid, experts": GRANITE_H
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 256, "attention_bias": True},
    "bamba": MAMBA | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "mamba_conv_bias": False},
    "falcon-h1": MAMBA | {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 512, "head_dim": 32},
    "falcon-h1, norm": MAMBA
    | {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 512, "head_dim": 32, "mamba_rms_norm": True}
    | {"mamba_norm_before_gate": False},
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H
    | {"hybrid_override_pattern": "ME*E", "n_routed_experts": 5, "num_experts_per_tok": 2, "gating_func": 2}
    | {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512, "routed_scaling_factor": 1.5}
    | {"norm_topk_prob": True},
}


@pytest.mark.parametrize("family", MAMBAS)
def test_file_with_mamba_equals_the_folder(
    family: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Decays, stored as exponentials, may differ in their last bit."""
    folder = write_random_folder(tmp_path / "model", MAMBAS[family], torch.bfloat16)
    floats = convert(folder, tmp_path / "floats.gguf")
    ours, expected = (
        logits_of(path, back_end, paged_runner, dtype="float32").log_softmax(dim=-1) for path in (floats, folder)
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert "not used" not in caplog.text
    kinds = {"ssm_out.weight": "Q6_K", "ssm_conv1d.weight": "F32"}
    source = read_source(convert(folder, tmp_path / "model.gguf", random_blocks(kinds, "Q4_K")))
    quantization = source.quantization(QuantizationOptions())
    decoder = load_model(source, back_end=back_end, quantization=quantization)
    assert torch.isfinite(paged_runner(decoder).step({"a": PROMPT})["a"]).all()
    if back_end.name == "cpp":
        assert decoder.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=quantization)


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("granitehybrid", "ssm.inner_size", 500, "ssm.inner_size must be a multiple of embedding_length 256, got 500"),
        ("bamba", "residual_scale", 0.5, "residual_scale = 0.5 is not supported yet: a Bamba has no such factor"),
        ("falcon-h1", "ssm.time_step_rank", 15, "ssm.inner_size = 512 does not divide among 15 heads"),
        ("nemotron_h_moe", "moe_latent_size", 64, "moe_latent_size = 64 is not supported yet"),
        ("nemotron_h", "feed_forward_length", [0, 2, 0, 3], "feed_forward_length must be 0 or one other number"),
    ],
)
def test_mamba_of_files_that_is_not_computed_is_refused(
    family: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    folder = write_random_folder(tmp_path / "model", MAMBAS[family], torch.float32)
    name = "granitehybrid" if family == "bamba" else family
    with pytest.raises(ModelError, match=re.escape(message)):
        read_source(convert(folder, tmp_path / "model.gguf", **{f"{name}.{key}": value}))


@pytest.mark.parametrize("heads", [[0, 2, 2], [0, -1], [1, 2]])
def test_kv_heads_that_differ_beyond_convolutions_are_refused(tmp_path: Path, heads: list[int]) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS["lfm2"], torch.float32)
    with pytest.raises(ModelError, match=r"lfm2.attention.head_count_kv must be "):
        read_source(convert(folder, tmp_path / "model.gguf", **{"lfm2.attention.head_count_kv": heads}))


@pytest.mark.parametrize(("key", "value"), [("expert_gating_func", 1), ("expert_group_used_count", 2)])
def test_routers_that_are_not_computed_are_refused(tmp_path: Path, key: str, value: int) -> None:
    folder = write_random_folder(tmp_path / "model", WITH_EXPERTS["glm4moe"], torch.float32)
    with pytest.raises(ModelError, match=f"{key} .*{value}"):
        read_source(convert(folder, tmp_path / "model.gguf", **{f"glm4moe.{key}": value}))


def test_stacked_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    for shape in ((3, 32), (300_000, 1, 1)):
        matrix = torch.zeros(shape)
        path = write_gguf(tmp_path / "model.gguf", {}, {"blk.0.ffn_up_exps.weight": as_is("a", matrix)})
        with pytest.raises(ModelError, match=r"'blk.0.ffn_up_exps.weight' has shape .*, expected \[experts, rows, wid"):
            read_source(path)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_quantized_file_equals_the_dequantized_folder_to_the_bit(
    mixture: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    folder = write_random_folder(tmp_path / "model", LLAMA)
    file = convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES[mixture]))
    twin = dequantized(folder, file, tmp_path / "twin", torch.bfloat16)
    assert read_source(file).dtype() == "bfloat16"
    ours = logits_of(file, back_end, paged_runner, asked=EXPANDED)
    assert ours.std() > 0
    assert torch.equal(ours, logits_of(twin, back_end, paged_runner))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_file_of_each_family(
    family: str, dtype: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    stored = torch.bfloat16 if family == "lfm2" else torch.float32  # convolutions are not rounded
    folder = write_random_folder(tmp_path / "model", CONFIGS[family], stored)
    file = convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES["as Q4_K_M"]))
    twin = dequantized(folder, file, tmp_path / "twin", getattr(torch, dtype))
    ours = logits_of(file, back_end, paged_runner, dtype=dtype, asked=EXPANDED)
    assert torch.equal(ours, logits_of(twin, back_end, paged_runner))


@pytest.mark.parametrize("activations", [None, "bfloat16"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_ranks_have_the_bits_of_one(
    mixture: str, activations: Activations | None, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    folder = write_random_folder(tmp_path / "model", LLAMA)
    source = read_source(convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES[mixture])))
    quantization = source.quantization(QuantizationOptions(activations=activations))
    assert_ranks_have_the_bits_of_one(
        source.spec,
        lambda ranks: load_model(source, back_end=back_end, quantization=quantization, ranks=ranks),
        lambda model: paged_runner(model).run("a", list(range(1, 40)), [7, 20, 12]),
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_ranks_divide_delta_nets_of_files(
    family: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    """Of 8 value heads over 4 key heads two ranks read all key heads, and each of four reads two."""
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    folder = write_random_folder(tmp_path / "model", HYBRIDS[family] | {"linear_num_key_heads": 4})
    source = read_source(convert(folder, tmp_path / "model.gguf", random_blocks({"ssm_out.weight": "Q6_K"}, "Q4_K")))
    assert_ranks_have_the_bits_of_one(
        source.spec,
        lambda ranks: load_model(source, back_end=back_end, ranks=ranks),
        lambda model: paged_runner(model).run("a", list(range(1, 40)), [7, 20, 12]),
        (2, 4),
    )


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_ranks_divide_experts_of_files(
    family: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    folder = write_random_folder(tmp_path / "model", WITH_EXPERTS[family])
    source = read_source(convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES["as Q4_K_M"])))
    assert_ranks_have_the_bits_of_one(
        source.spec,
        lambda ranks: load_model(source, back_end=back_end, ranks=ranks),
        lambda model: paged_runner(model).run("a", list(range(1, 40)), [7, 20, 12]),
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_file_quantized_by_the_gguf_package(
    kind: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    quants, quant_type = package.quants, package.GGMLQuantizationType[kind]
    folder, path = write_random_folder(tmp_path / "model", LLAMA), tmp_path / "model.gguf"
    metadata, tensors = converted(folder)
    writer, twin = package.GGUFWriter(path, metadata.pop("general.architecture")), {}
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, (_, shape, stored) in tensors.items():
        values = np.frombuffer(stored, np.float32).reshape(shape)
        if len(shape) > 1:
            blocks = quants.quantize(values, quant_type)
            writer.add_tensor(name, blocks, raw_dtype=quant_type)
            values = quants.dequantize(blocks, quant_type)
        else:
            writer.add_tensor(name, values)
        twin[name] = as_is(name, torch.tensor(values).bfloat16())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dequantized_file = write_gguf(tmp_path / "twin.gguf", metadata | {"general.architecture": "llama"}, twin)
    ours = logits_of(path, back_end, paged_runner, asked=EXPANDED)
    assert torch.equal(ours, logits_of(dequantized_file, back_end, paged_runner))
    exact = logits_of(folder, back_end, paged_runner, dtype="bfloat16")
    assert torch.corrcoef(torch.stack([ours.flatten(), exact.flatten()]))[0, 1] > 0.9


def read_fused(
    tmp_path: Path,
    kinds: list[str],
    rows: list[ModuleRows] | None = None,
    magnitudes: dict[str, tuple[int, int]] | None = None,
    activations: Activations | None = None,
) -> tuple[LinearWeight, Tensor]:
    """Return fused modules of random blocks, and the values of their rows."""
    ranges = [(magnitudes or {}).get(kind, (-4, 0)) for kind in kinds]
    made = [
        random_rows(kind, 32, 256, seed, least=least, most=most)
        for seed, (kind, (least, most)) in enumerate(zip(kinds, ranges, strict=True))
    ]
    pairs = enumerate(zip(kinds, made, strict=True))
    stored = {f"{number}.weight": (kind, (32, 256), each.tobytes()) for number, (kind, each) in pairs}
    checkpoint = GGUFCheckpoint(GGUFFile(write_gguf(tmp_path / "a.gguf", {}, stored)), {})
    tensors = TensorReader(checkpoint, FLOAT32)
    modules = rows or [ModuleRows.whole(str(number), 32) for number in range(len(kinds))]
    weight = GGUFFormat(checkpoint, "token_embd", activations).read(tensors, modules, 256, is_transposed=False)
    values = [torch.from_numpy(read_values(kind, each)) for kind, each in zip(kinds, made, strict=True)]
    return weight_of_tensors(weight), torch.cat([values[int(each.module)][each.start : each.stop] for each in modules])


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        (["Q4_K", "Q4_K", "Q4_K"], "int4"),
        (["IQ4_XS", "IQ4_NL", "IQ4_XS"], "codebook4"),
        (["Q4_K", "Q4_K", "Q6_K"], "int8"),
        (["Q5_0", "Q6_K", "Q8_0"], "int8"),
        (["IQ4_NL", "Q4_0", "MXFP4"], "int8"),
        (["Q5_K", "Q4_1", "Q5_1"], "int8"),
        (["IQ4_XS", "IQ4_XS", "Q5_K"], "int8"),
        (["IQ4_NL", "MXFP4", "Q4_1"], "int8"),
    ],
)
def test_fused_modules_of_several_types_keep_their_values(tmp_path: Path, kinds: list[str], kept: str) -> None:
    weight, values = read_fused(tmp_path, kinds)
    assert weight.format == kept
    assert torch.equal(expand(weight), values)


def test_fused_modules_that_no_integers_stand_for_become_floats(tmp_path: Path) -> None:
    large = {"MXFP4": (40, 41)}  # 2 ** 120 times a code is a float32, times 128 it is not
    weight, values = read_fused(tmp_path, ["Q4_1", "MXFP4"], magnitudes=large)
    assert weight.format == "dense"
    assert torch.equal(torch.cat(weight.data), values)


def test_rows_in_ranges_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    ranges = [ModuleRows("0", 32, 16, 32), ModuleRows("1", 32, 0, 16), ModuleRows("2", 32, 16, 16)]
    weight, values = read_fused(tmp_path, ["Q4_K", "Q6_K", "Q6_K"], ranges)
    assert weight.out_features == 32
    assert torch.equal(expand(weight), values)


@pytest.mark.parametrize("kind", SCHEMES)
def test_scheme_of_a_type_is_that_of_its_weights(kind: str, tmp_path: Path) -> None:
    weight, _ = read_fused(tmp_path, [kind])
    scheme = SCHEMES[kind]
    correction = "minimums" if weight.minimums is not None else "constant"
    assert (weight.format, weight.group_size, correction) == (scheme.format, scheme.group_size, scheme.correction)
    assert SCHEMES.keys() == KINDS.keys()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = write_random_folder(tmp_path / "model", LLAMA)
    return convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES["as Q4_K_M"]))


@pytest.mark.parametrize("kinds", [["IQ4_NL", "Q4_0"], ["Q4_K", "Q6_K"], ["Q4_0", "Q8_0"]], ids="-".join)
@pytest.mark.parametrize("activations", [None, "int8", "bfloat16"])
def test_scheme_of_fused_types_is_that_of_their_weight(
    activations: Activations | None, kinds: list[str], tmp_path: Path
) -> None:
    weight, _ = read_fused(tmp_path, kinds, activations=activations)
    modules = {kind: block_scheme(kind, activations) for kind in kinds}
    scheme = GGUFQuantization("gguf", activations=activations, modules=modules).scheme(kinds)
    assert (scheme.format, scheme.group_size) == (weight.format, weight.group_size)
    assert scheme.activation_group_size == weight.activation_group_size


def test_log_names_types_and_arithmetic(file: Path, back_end: BackEnd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load_model(read_source(file), back_end=back_end)
    assert (
        "quantization gguf (Q4_K, Q6_K): int4 weights in groups of 32, int8 activations in groups of 32; "
        "output head: int4 weights in groups of 32, int8"
    ) in caplog.text


def test_option_that_contradicts_the_file_is_refused(file: Path, tmp_path: Path) -> None:
    source = read_source(file)
    for method in ("int8", "awq", "none"):
        with pytest.raises(ConfigError, match=rf"quantization '{method}' contradicts .*model.gguf, .* Q4_K, Q6_K"):
            source.quantization(QuantizationOptions(method))  # type: ignore[arg-type]
    assert source.quantization(QuantizationOptions("gguf")) == source.quantization(QuantizationOptions())
    floats = read_source(convert(tmp_path / "model", tmp_path / "floats.gguf"))
    assert floats.quantization(QuantizationOptions("gguf")).method == "none"
    assert floats.quantization(QuantizationOptions("int8")).method == "int8"


def test_activations_are_rounded_in_the_groups_of_blocks_unless_bfloat16_is_asked_for(
    file: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    found = read_source(file).quantization(QuantizationOptions())
    assert (found.layers.activation_group_size, found.head.activation_group_size) == (32, 32)
    assert found == replace(read_source(file).quantization(QuantizationOptions(activations="int8")), activations=None)
    expanded = logits_of(file, back_end, paged_runner, asked=EXPANDED).log_softmax(1)
    rounded = logits_of(file, back_end, paged_runner).log_softmax(1)
    assert not torch.equal(rounded, expanded)
    assert (expanded.exp() * (expanded - rounded)).sum(1).mean() < 0.05


@pytest.mark.parametrize(
    "kinds", [*([kind] for kind, scheme in SCHEMES.items() if scheme.format != "codebook4"), ["Q4_K", "Q4_K", "Q6_K"]],
    ids="-".join,
)
def test_layer_with_int8_activations_is_the_reference_to_the_bit(
    kinds: list[str], tmp_path: Path, back_end: BackEnd
) -> None:
    weight, _ = read_fused(tmp_path, kinds, activations="int8")
    assert weight.activation_group_size == weight.group_size
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear_of(back_end, weight, x), reference(x, weight))


@pytest.mark.skipif(not usable_isas(), reason="the C++ extension was not built")
@pytest.mark.parametrize("activations", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_table_of_a_tied_head_is_packed_by_portions_to_the_same_bytes_and_has_the_rows_of_its_blocks(
    kind: str, activations: Activations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.cpp.cpp_linear import CppHead

    monkeypatch.setattr(gguf_weights, "ELEMENTS_AT_ONCE", 40 * 512)  # portions of 32 rows, and one of 6
    rows, ids = random_rows(kind, 102, 512), np.array([101, 0, 31, 32, 97, 15, 16])
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, {"token_embd.weight": (kind, (102, 512), rows.tobytes())}))
    checkpoint, table = GGUFCheckpoint(file, {}), ModuleRows.whole("token_embd", 102)
    blocks, tensors = GGUFFormat(checkpoint, "token_embd", activations), TensorReader(checkpoint, BFLOAT16)
    found = blocks.read_table(tensors, table, 512)
    read = blocks.tied_weight(tensors, table, 512)
    assert read is not None
    assert found is not None
    ours, whole = CppHead(read()), CppHead(blocks.read_head(tensors, ModuleRows.whole("output", 102), 512, found))
    np.testing.assert_array_equal(ours.packed_weight.packed, whole.packed_weight.packed)
    assert ours.packed_weight.format[0] == whole.packed_weight.format[0]
    np.testing.assert_array_equal(bits(ours.table.look_up(ids)), bits(found.look_up(ids)))
    for token in (-1, 102):
        with pytest.raises(IndexError):
            ours.table.look_up(np.array([0, token]))


def test_floats_of_a_file_are_quantized_as_those_of_a_folder(
    tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    folder = write_random_folder(tmp_path / "model", LLAMA, torch.bfloat16)
    file, asked = convert(folder, tmp_path / "model.gguf"), QuantizationOptions("int8")
    ours = logits_of(file, back_end, paged_runner, asked)
    assert torch.equal(ours, logits_of(folder, back_end, paged_runner, asked))


def test_scale_that_is_no_number_is_named(tmp_path: Path, back_end: BackEnd) -> None:
    folder = write_random_folder(tmp_path / "model", LLAMA)
    fill = random_blocks({}, "Q8_0")

    def spoil(name: str, tensor: Tensor) -> Any:  # noqa: ANN401
        kind, shape, stored = fill(name, tensor)
        if name == "blk.0.ffn_up.weight":
            stored = np.array([np.inf], np.float16).tobytes() + stored[2:]
        return kind, shape, stored

    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight has values that are NaN or infinite"):
        load_model(read_source(convert(folder, tmp_path / "model.gguf", spoil)), back_end=back_end)


def test_unsupported_type_and_missing_tensor_are_named(tmp_path: Path, back_end: BackEnd) -> None:
    folder = write_random_folder(tmp_path / "model", LLAMA)
    fill = random_blocks({}, "Q4_K")

    def spoil(name: str, tensor: Tensor) -> Any:  # noqa: ANN401
        if name == "blk.0.ffn_down.weight":
            return "Q2_K", tuple(tensor.shape), bytes(tensor.numel() // 256 * 84)
        return fill(name, tensor)

    path = convert(folder, tmp_path / "model.gguf", spoil)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_down\.weight has type Q2_K, which is not supported; sup"):
        load_model(read_source(path), back_end=back_end)
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_down", b"blk.0.fxn_down"))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_down\.weight is missing; expected shape \[256, 512\]"):
        load_model(read_source(path), back_end=back_end)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_ranks_add_partial_sums_of_whole_blocks(
    mixture: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable[..., Any]
) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    folder = write_random_folder(tmp_path / "model", LLAMA)
    source = read_source(convert(folder, tmp_path / "model.gguf", random_blocks(*MIXTURES[mixture])))
    quantization = source.quantization(EXPANDED)

    def load(ranks: Ranks | None) -> Decoder:
        return load_model(source, dtype="float32", back_end=back_end, quantization=quantization, ranks=ranks)

    def use(decoder: Decoder | RankDecoder) -> Tensor:
        return paged_runner(decoder).run("a", list(range(1, 40)), [7, 20, 12])

    found, alone = logits_of_ranks(2, source.spec, load, use, "reduce"), use(load(None))
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5 * alone.abs().max().item())  # random blocks are large
