"""config.json in its spellings, and what of it ends in the spec."""

import re

import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.kernels.reference.back_ends import TORCH
from quire.model.config import num_parameters, spec_from_config
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.rope import inverse_frequencies
from quire.model.spec import DecoderSpec
from quire_lab.sim.footprint import kv_bytes_per_token, weight_bytes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def spec(architecture: str = "Llama", **changes: object) -> DecoderSpec:
    return spec_from_config({**LLAMA, "architectures": [f"{architecture}ForCausalLM"], **changes})


def test_missing_and_null_mean_the_same() -> None:
    assert spec(num_key_value_heads=None, head_dim=None, rope_scaling=None) == spec()
    assert spec().attentions[0].num_kv_heads == 4
    assert spec().head_dim == 8


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_and_new_spelling_of_rope_give_the_same_frequencies(key: str) -> None:
    old = spec(rope_theta=5000.0, rope_scaling={key: "llama3", **SCALING})
    new = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5000.0, **SCALING})
    assert old == new
    assert old.rotary != spec(rope_theta=5000.0).rotary


def test_original_length_at_the_top_level_wins() -> None:
    inside = spec(rope_scaling={"type": "llama3", **SCALING})
    above = spec(
        rope_scaling={"type": "llama3", **SCALING, "original_max_position_embeddings": 9},
        original_max_position_embeddings=64,
    )
    assert inside == above


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "linear", "factor": 1e-30}, 1),
        ({"type": "dynamic", "factor": 2.5}, 640),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 1e30}, 2**24),
        ({"type": "llama3", **SCALING}, 256),
        ({"type": "default"}, 256),
    ],
    ids=str,
)
def test_scaling_provides_its_factor_times_the_original_length(scaling: dict[str, object], longest: int) -> None:
    assert spec(rope_scaling=scaling).max_position_embeddings == longest


def test_dynamic_scaling_has_to_be_asked_for() -> None:
    dynamic = spec(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (dynamic.default_positions, dynamic.max_position_embeddings) == (256, 1024)
    assert spec().rotary is not None
    assert dynamic.rotary is not None
    plain = inverse_frequencies(spec().rotary, 256)
    np.testing.assert_array_equal(inverse_frequencies(dynamic.rotary, 256), plain)
    stretched = inverse_frequencies(dynamic.rotary, 257)
    np.testing.assert_array_equal(inverse_frequencies(dynamic.rotary, 1024), stretched)
    assert (stretched[1:] < plain[1:]).all()


def test_millions_of_positions_are_no_fault_of_a_config() -> None:
    assert spec(max_position_embeddings=2**22, head_dim=128).max_position_embeddings == 2**22


def test_mistral_has_a_window_unless_it_is_null() -> None:
    assert spec("Mistral").windows == (4096,) * 4
    assert spec("Mistral", sliding_window=None).windows == (None,) * 4
    assert spec("Mistral", sliding_window=7).sliding_window == 7


def test_qwen_windows_count_only_when_switched_on() -> None:
    assert spec("Qwen2", sliding_window=7, max_window_layers=0).windows == (None,) * 4
    on = spec("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=3)
    assert on.windows == (None, None, None, 7)
    assert on.sliding_window is None
    assert spec("Qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=0).sliding_window == 7


def test_qwen3_heads_are_128_wide_unless_said_otherwise() -> None:
    assert spec("Qwen3").head_dim == 128
    assert spec("Qwen3", head_dim=16).head_dim == 16


def test_gpt2_with_an_encoder_is_refused() -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    assert spec_from_config(config | {"n_positions": 16}).layers[0].feed_forward.size == 32
    with pytest.raises(ModelError, match="add_cross_attention = True is not supported yet"):
        spec_from_config(config | {"n_positions": 16, "add_cross_attention": True})


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "kib"), [(32, 8, 128, 128), (80, 8, 128, 320), (96, 96, 128, 4608)]
)
def test_cache_bytes_of_a_token(layers: int, kv_heads: int, head_dim: int, kib: int) -> None:
    big = spec(
        num_hidden_layers=layers, num_attention_heads=kv_heads * 1, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    assert kv_bytes_per_token(big, 2) == kib * 1024


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2_LITE = LATENT | {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "vocab_size": 102_400, "max_position_embeddings": 163_840,
}  # fmt: skip
V3 = LATENT | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "q_lora_rank": 1536, "vocab_size": 129_280, "max_position_embeddings": 163_840, "num_nextn_predict_layers": 1,
}  # fmt: skip
FLASH = LATENT | {
    "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154_880,
    "max_position_embeddings": 202_752,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "token_bytes", "billions"),
    [("DeepseekV2", V2_LITE, 31_104, 15.7), ("DeepseekV3", V3, 70_272, 671.0), ("Glm4MoeLite", FLASH, 54_144, 30.0)],
)
def test_published_models_with_latents_have_the_sizes_of_their_papers(
    family: str, config: dict[str, object], token_bytes: int, billions: float
) -> None:
    published = spec_from_config(config | {"architectures": [f"{family}ForCausalLM"]})
    assert kv_bytes_per_token(published, 2) == token_bytes
    assert KVGeometry.of(published, "bfloat16").bytes_per_token(16) == token_bytes
    assert weight_bytes(published, "bfloat16") / 2e9 == pytest.approx(billions, rel=0.01)


QWEN3_5 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"tie_word_embeddings": False}}
QWEN3_5_MOE = QWEN3_5 | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "intermediate_size": 5632, "vocab_size": 151_936, "max_position_embeddings": 262_144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "token_kib", "num_states"),
    [(QWEN3_5, 8.95, 32, 24), (QWEN3_5_MOE, 34.7, 20, 30), (QWEN3_NEXT, 79.67, 24, 36)],
)
def test_published_models_with_delta_nets_have_the_sizes_of_their_configs(
    config: dict[str, object], billions: float, token_kib: int, num_states: int
) -> None:
    """A state is float32 [128, 128] for each of 32 heads; behind it are the inputs of 5 tokens, in whole lines."""
    published = spec_from_config(config)
    assert num_parameters(published) / 1e9 == pytest.approx(billions, rel=0.002)
    geometry = KVGeometry.of(published, "bfloat16")
    assert geometry.bytes_per_token(16) == token_kib * 1024
    inputs = 5 * (2 * 16 * 128 + 32 * 128 + 2 * 32) * 2
    assert geometry.slot_bytes == num_states * (32 * 128 * 128 * 4 + -(-inputs // 64) * 64)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_output_gate", False, "attn_output_gate = False is not supported yet: results of attention are gated"),
        ("output_gate_type", "sigmoid", "output_gate_type = 'sigmoid' is not supported yet: results of delta nets"),
        ("use_sliding_window", True, "use_sliding_window = True is not supported yet"),
        ("layer_types", ["mamba"], "layer_types must be a list of linear_attention or full_attention"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries for 32 layers"),
        ("linear_num_value_heads", 24, "24 value heads do not divide among 16 key heads"),
        ("linear_key_head_dim", 24, "keys of 24 dimensions are not supported: multiples of 16 are"),
        ("linear_conv_kernel_dim", 17, "linear_conv_kernel_dim must be an integer from 1 to 16, got 17"),
    ],
)
def test_delta_nets_that_are_not_computed_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(QWEN3_5 | {"text_config": {key: value}})


def test_cache_holds_what_is_counted_and_begins_as_zeros() -> None:
    small = spec(num_key_value_heads=2)
    cache = KVCache.allocate(KVGeometry.of(small, "bfloat16"), num_blocks=3, block_size=8, back_end=TORCH)
    tensors = [*cache.keys, *cache.values]
    assert {tuple(tensor.shape) for tensor in tensors} == {(3, 8, 2, 8)}
    assert sum(tensor.nbytes for tensor in tensors) == 3 * 8 * kv_bytes_per_token(small, 2)
    assert not any(tensor.any() for tensor in tensors)
    assert cache.block_size == 8
