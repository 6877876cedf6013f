"""Geometry of keys and values: bytes, windows, and models joined over the same block tables."""

import pytest

from quire.core.config import ELEMENT_BYTES, QUANTIZED
from quire.model.config import spec_from_config
from quire.model.kv_cache import KVGeometry, LayerKV, LayerTail
from quire_lab.sim.footprint import kv_bytes_per_token, stored_kv_bytes_per_token

SPEC = spec_from_config(
    {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "sliding_window": 32,
    }
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_geometry_of_a_decoder_counts_what_its_cache_takes(dtype: str) -> None:
    geometry = KVGeometry.of(SPEC, dtype)
    assert geometry.layers == (LayerKV(2, 8, dtype, window=32),) * 3
    assert geometry.bytes_per_token(16) == kv_bytes_per_token(SPEC, ELEMENT_BYTES[dtype])
    assert geometry.tensor_bytes(1, 10) == [10 * 2 * 8 * ELEMENT_BYTES[dtype]] * 6


def test_scale_per_token_and_head_is_counted() -> None:
    """The figure of an 8-bit cache of Qwen2.5-0.5B: 24 layers of 2 heads of 64, a float32 scale each."""
    assert KVGeometry((LayerKV(2, 64, "int8", "float32"),) * 24).bytes_per_token(16) == 6528
    assert KVGeometry((LayerKV(2, 64, "bfloat16"),) * 24).bytes_per_token(16) == pytest.approx(1.88 * 6528, rel=0.002)


@pytest.mark.parametrize("name", QUANTIZED)
def test_planned_bytes_of_a_quantized_cache_are_the_geometry_s(name: str) -> None:
    geometry = KVGeometry.of(SPEC, *QUANTIZED[name])
    assert geometry.quantized_dtype == name
    assert KVGeometry.of(SPEC, "bfloat16").quantized_dtype == ""
    assert geometry.bytes_per_token(16) == stored_kv_bytes_per_token(SPEC, name)
    assert geometry.bytes_per_token(16) == 2 * 3 * 2 * (8 + (0 if name == "fp8" else 4))


def test_layers_without_values_have_a_tensor_of_keys_alone() -> None:
    """The cache of a DeepSeek V2-Lite: a latent of 512 and a rotated key of 64 for each token, 31 kB over 27 layers."""
    latent = KVGeometry((LayerKV(1, 576, "bfloat16", latent_dim=512),) * 27)
    assert latent.bytes_per_token(16) == 27 * 1152
    assert latent.joined(KVGeometry.of(SPEC, "bfloat16")).tensor_bytes(1, 1) == [1152] * 27 + [32] * 6


@pytest.mark.parametrize(("name", "num_bytes"), [
    ("int8_per_token_head", 656), ("fp8_per_token_head", 656), ("fp8", 576)
])  # fmt: skip
def test_latents_in_8_bits_have_four_scales_and_rotated_dimensions_in_16_bits(name: str, num_bytes: int) -> None:
    spec = spec_from_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27,
            "num_attention_heads": 16, "intermediate_size": 10_944, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "vocab_size": 99,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    geometry = KVGeometry.of(spec, *QUANTIZED[name])
    assert geometry.bytes_per_token(16) == stored_kv_bytes_per_token(spec, name) == 27 * num_bytes
    assert geometry.quantized_dtype == name


def test_short_convolutions_keep_the_last_tokens_of_each_block() -> None:
    """LFM2-1.2B: 10 layers of width 2,048 over 3 tokens beside 6 of attention, 12 KiB per token."""
    spec = spec_from_config(
        {
            "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 65_536,
            "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        }
    )  # fmt: skip
    plain, drafting = (KVGeometry.of(spec, "bfloat16", max_truncated=each) for each in (1, 5))
    assert plain.has_tails
    assert not KVGeometry.of(SPEC, "bfloat16").has_tails
    assert plain.bytes_per_token(16) == 12 * 1024 + 10 * 3 * 2048 * 2 // 16
    assert drafting.bytes_per_token(16) == 12 * 1024 + 10 * 7 * 2048 * 2 // 16
    assert KVGeometry.of(spec, "bfloat16", max_truncated=17).bytes_per_token(16) == 12 * 1024 + 10 * 2048 * 2
    assert plain.tensor_bytes(2, 16) == [
        2 * each for each in (16384 if isinstance(layer, LayerKV) else 12288 for layer in plain.layers)
    ] + [2 * 16384] * 6  # fmt: skip
    assert KVGeometry.of(spec, "int8", "float32", tail_dtype="bfloat16").layers[0] == LayerTail(3, 2048, "bfloat16")


def test_joined_geometry_has_the_layers_of_every_model() -> None:
    draft = KVGeometry((LayerKV(1, 16, "float32"),))
    target = KVGeometry.of(SPEC, "bfloat16")
    joined = target.joined(draft)
    assert joined.layers == target.layers + draft.layers
    assert joined.bytes_per_token(16) == target.bytes_per_token(16) + draft.bytes_per_token(16)
    assert joined.tensor_bytes(1, 1) == [32, 32, 32, 64] * 2
    assert target.joined() == target


def test_blocks_before_the_window_are_needed_by_a_joined_model_without_one() -> None:
    target = KVGeometry.of(SPEC, "bfloat16")
    assert target.sliding_window == 32
    assert target.joined(KVGeometry((LayerKV(1, 16, "float32", window=48),))).sliding_window == 48
    assert target.joined(KVGeometry((LayerKV(1, 16, "float32"),))).sliding_window is None
