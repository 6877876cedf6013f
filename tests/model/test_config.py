"""config.json in its spellings, and what of it ends in the spec."""

import math
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


OLMO_HYBRID = {"architectures": ["OlmoHybridForCausalLM"]}


def test_olmo_hybrid_as_published_has_the_sizes_of_its_config() -> None:
    """Heads of 96 and 192 dimensions, and no rotary positions unless the config names their base."""
    published = spec_from_config(OLMO_HYBRID)
    assert num_parameters(published) / 1e9 == pytest.approx(7.43, rel=0.002)
    geometry = KVGeometry.of(published, "bfloat16")
    assert geometry.bytes_per_token(16) == 8 * 30 * 128 * 2 * 2
    inputs = 5 * (2 * 30 * 96 + 30 * 192 + 2 * 30) * 2
    assert geometry.slot_bytes == 24 * (30 * 96 * 192 * 4 + -(-inputs // 64) * 64)
    assert not published.rotaries
    for rope in ({"rope_type": "default", "rope_theta": None}, None):
        assert not spec_from_config(OLMO_HYBRID | {"rope_parameters": rope}).rotaries
    assert spec_from_config(OLMO_HYBRID | {"rope_parameters": {"rope_theta": 5e5}}).rotaries[0].theta == 5e5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer_types", ["mamba"], "layer_types must be a list of linear_attention or full_attention"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries for 32 layers"),
        ("layer_types", ["linear_attention"] * 32, "models without a layer of attention are not supported"),
        ("linear_num_value_heads", 45, "45 value heads do not divide among 30 key heads"),
        ("linear_num_key_heads", 20, "30 value heads do not divide among 20 key heads"),
        ("linear_key_head_dim", 24, "keys of 24 dimensions are not supported: multiples of 16 are"),
        ("clip_qkv", 8.0, "clip_qkv = 8.0 is not supported yet"),
        ("hidden_act", "gelu", "hidden_act"),
    ],
)
def test_olmo_hybrids_that_are_not_computed_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(OLMO_HYBRID | {key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_output_gate", False, "attn_output_gate = False is not supported yet: results of attention are gated"),
        ("output_gate_type", "sigmoid", "output_gate_type = 'sigmoid' is not supported yet: results of delta nets"),
        ("use_sliding_window", True, "use_sliding_window = True is not supported yet"),
        ("layer_types", ["mamba"], "layer_types must be a list of linear_attention or full_attention"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries for 32 layers"),
        ("layer_types", ["linear_attention"] * 32, "models without a layer of attention are not supported"),
        ("linear_num_value_heads", 24, "24 value heads do not divide among 16 key heads"),
        ("linear_key_head_dim", 24, "keys of 24 dimensions are not supported: multiples of 16 are"),
        ("linear_conv_kernel_dim", 17, "linear_conv_kernel_dim must be an integer from 1 to 16, got 17"),
    ],
)
def test_delta_nets_that_are_not_computed_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(QWEN3_5 | {"text_config": {key: value}})


KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "hidden_act": "silu",
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "model_max_length": 1_048_576, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}  # fmt: skip
KDA = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [number for number in range(1, 27) if number % 4], "head_dim": 128, "num_heads": 32,
    "short_conv_kernel_size": 4,
}  # fmt: skip


def test_kimi_linear_as_published_has_the_sizes_of_its_config() -> None:
    """The numbers are those of transformers' model, parameters and biases of choice; a token uses 8 of 256 experts."""
    published = spec_from_config(KIMI_LINEAR | {"linear_attn_config": KDA})
    assert num_parameters(published) == 49_122_681_728
    experts = 26 * 256 * 3 * 2304 * 1024
    assert num_parameters(published) - experts + experts * 8 // 256 == 3_484_459_904
    assert [index for index, layer in enumerate(published.layers) if layer.attention] == [3, 7, 11, 15, 19, 23, 26]
    assert not published.rotaries
    assert published.max_position_embeddings == 1_048_576
    geometry = KVGeometry.of(published, "bfloat16")
    assert geometry.bytes_per_token(16) == 7 * 576 * 2
    inputs = 5 * (3 * 32 * 128 + 32 + 32 * 128) * 2
    assert geometry.slot_bytes == 20 * (32 * 128 * 128 * 4 + -(-inputs // 64) * 64)


def test_layers_of_kimi_linear_are_numbered_from_1_or_named() -> None:
    types = ["linear_attention"] * 27
    for number in KDA["full_attn_layers"]:
        types[number - 1] = "full_attention"
    named = {"layer_types": types, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    published = spec_from_config(KIMI_LINEAR | {"linear_attn_config": KDA})
    assert spec_from_config(KIMI_LINEAR | named) == published
    assert spec_from_config(KIMI_LINEAR | named | {"linear_attn_config": KDA}) == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported yet: its attention turns nothing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported yet"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be one of sigmoid, got 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported yet"),
        ({"num_experts": 0}, "num_experts must be an integer from 1 to 4096, got 0"),
        ({"num_experts_per_token": 257}, "num_experts_per_token must be an integer from 1 to 256, got 257"),
        ({"model_max_length": 0}, "model_max_length must be an integer from 1 to 16777216, got 0"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not supported yet"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True is not supported yet: what Kimi K3 adds is not"),
        ({"attn_res_block_size": 12}, "attn_res_block_size = 12 is not supported yet"),
        ({"linear_attn_config": None}, "kda_layers and full_attn_layers together are not the layers from 1 to 27"),
        ({"linear_attn_config": KDA | {"kda_layers": [1]}}, "kda_layers and full_attn_layers together are not the"),
        ({"linear_attn_config": KDA | {"kda_layers": list(range(1, 28))}}, "kda_layers and full_attn_layers together"),
        ({"linear_attn_config": KDA | {"kda_layers": [28]}}, "kda_layers must be a list of integers from 0 to 27"),
        ({"linear_attn_config": KDA | {"head_dim": 24}}, "keys of 24 dimensions are not supported: multiples of 16"),
        ({"linear_attn_config": KDA | {"num_heads": 0}}, "linear_attn_config: num_heads must be an integer from 1"),
        ({"linear_attn_config": KDA | {"gate_lower_bound": -5.0}}, "gate_lower_bound = -5.0 is not supported yet"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 27 layers"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries for 27 layers"),
    ],
)
def test_kimi_linear_that_is_not_computed_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(KIMI_LINEAR | {"linear_attn_config": KDA} | changes)


GRANITE_H = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100_352, "num_hidden_layers": 40,
    "max_position_embeddings": 131_072, "position_embedding_type": "nope", "mamba_d_state": 128, "mamba_d_head": 64,
    "mamba_n_groups": 1, "tie_word_embeddings": True, "num_local_experts": 0,
    "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
}  # fmt: skip
GRANITE_MICRO = GRANITE_H | {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "shared_intermediate_size": 8192,
    "mamba_n_heads": 64,
}  # fmt: skip
GRANITE_TINY = GRANITE_H | {
    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 1024,
    "mamba_n_heads": 48, "num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512,
}  # fmt: skip
GRANITE_SMALL = GRANITE_H | {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "shared_intermediate_size": 1536,
    "mamba_n_heads": 128, "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768,
}  # fmt: skip


NEMOTRON_NANO = {
    "architectures": ["NemotronHForCausalLM"], "vocab_size": 131_072, "hidden_size": 2688, "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME", "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 262_144, "time_step_limit": [0.0, math.inf],
}  # fmt: skip
NEMOTRON_SUPER = NEMOTRON_NANO | {
    "hidden_size": 4096, "num_hidden_layers": 88, "mamba_num_heads": 128, "n_routed_experts": 512,
    "hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
}  # fmt: skip
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536,
    "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
}  # fmt: skip
FALCON_H1_34B = FALCON_H1 | {
    "vocab_size": 261_120, "hidden_size": 5120, "intermediate_size": 21_504, "num_hidden_layers": 72,
    "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
    "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 2,
}  # fmt: skip
BAMBA = {
    "architectures": ["BambaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "attn_rotary_emb": 64,
    "max_position_embeddings": 262_144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "token_bytes", "num_states", "heads", "state"),
    [
        (GRANITE_MICRO, 3.19, 4 * 2 * 8 * 64 * 2, 36, 64, (64, 128, 1)),
        (GRANITE_TINY, 6.94, 4 * 2 * 4 * 128 * 2, 36, 48, (64, 128, 1)),
        (GRANITE_SMALL, 32.2, 4 * 2 * 8 * 128 * 2, 36, 128, (64, 128, 1)),
        (NEMOTRON_NANO, 31.6, 6 * 2 * 2 * 128 * 2, 23, 64, (64, 128, 8)),
        (NEMOTRON_SUPER, 120.6, 8 * 2 * 2 * 128 * 2, 40, 128, (64, 128, 8)),
        (FALCON_H1, 0.521, 36 * 2 * 2 * 64 * 2, 36, 24, (64, 128, 1)),
        (FALCON_H1_34B, 33.6, 72 * 2 * 4 * 128 * 2, 72, 32, (128, 256, 2)),
        (BAMBA, 9.78, 3 * 2 * 8 * 128 * 2, 29, 128, (64, 128, 1)),
    ],
    ids=[
        "Granite-4.0-H-Micro", "Granite-4.0-H-Tiny", "Granite-4.0-H-Small", "Nemotron-3-Nano-30B-A3B",
        "Nemotron-3-Super-120B-A12B", "Falcon-H1-0.5B", "Falcon-H1-34B", "Bamba-9B",
    ],
)  # fmt: skip
def test_published_hybrids_of_mamba_have_the_sizes_of_their_configs(
    config: dict[str, object], billions: float, token_bytes: int, num_states: int, heads: int,
    state: tuple[int, int, int],
) -> None:  # fmt: skip
    """A state is float32 for each head; behind it are the inputs of 5 tokens, in whole lines."""
    published, (head_dim, state_dim, groups) = spec_from_config(config), state
    assert num_parameters(published) / 1e9 == pytest.approx(billions, rel=0.005)
    geometry = KVGeometry.of(published, "bfloat16")
    assert geometry.bytes_per_token(16) == token_bytes
    inputs = 5 * (heads * head_dim + 2 * groups * state_dim + heads) * 2
    assert geometry.slot_bytes == num_states * (heads * head_dim * state_dim * 4 + -(-inputs // 64) * 64)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (NEMOTRON_NANO, {"moe_latent_size": 0}, "moe_latent_size must be an integer from 1 to"),
        (NEMOTRON_NANO, {"attention_bias": True}, "attention_bias = True is not supported yet"),
        (NEMOTRON_NANO, {"mlp_bias": True}, "mlp_bias = True is not supported yet: experts have no biases"),
        (NEMOTRON_NANO, {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported yet"),
        (NEMOTRON_NANO, {"sliding_window": 8}, "sliding_window = 8 is not supported yet"),
        (NEMOTRON_NANO, {"residual_in_fp32": True}, "residual_in_fp32 = True is not supported yet"),
        (NEMOTRON_NANO, {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be one of relu2, got 'silu'"),
        (NEMOTRON_NANO, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu' is not supported yet"),
        (NEMOTRON_NANO, {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern must be a text of M or * or - or"),
        (NEMOTRON_NANO, {"hybrid_override_pattern": "M*"}, "names 2 layers, num_hidden_layers is 52"),
        (NEMOTRON_NANO, {"layers_block_type": ["conv"]}, "layers_block_type must be a list of linear_attention or"),
        (NEMOTRON_NANO, {"time_step_limit": [0.0, 0.1]}, "time_step_limit = [0.0, 0.1] is not supported"),
        (NEMOTRON_NANO, {"n_groups": 3}, "64 heads do not divide among 3 groups"),
        (NEMOTRON_NANO, {"conv_kernel": 17}, "conv_kernel must be an integer from 1 to 16, got 17"),
        (FALCON_H1, {"mamba_d_ssm": 1000}, "mamba_d_head = 64, mamba_n_heads = 24: heads must have the 1000 columns"),
        (FALCON_H1, {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        (FALCON_H1, {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers: 1 must be a number from 1e-30"),
        (FALCON_H1, {"mlp_multipliers": [1e-20, 1e20]}, "its multipliers make a factor of 1e+40, not from"),
        (FALCON_H1, {"projectors_bias": True}, "projectors_bias = True is not supported yet: mamba_proj_bias = False"),
        (FALCON_H1, {"attention_bias": True, "attention_in_multiplier": 0.5}, "attention_bias = True is not supported"),
        (FALCON_H1, {"mlp_bias": True, "mlp_multipliers": [0.5, 1.0]}, "mlp_bias = True is not supported yet"),
        (FALCON_H1, {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "mamba_proj_bias = True is not supported"),
        (BAMBA, {"attn_rotary_emb": 128}, "attn_rotary_emb = 128 is not supported yet: half of a head's 128"),
        (BAMBA, {"attn_layer_indices": [32]}, "attn_layer_indices must be a list of integers from 0 to 31"),
        (BAMBA, {"attn_layer_indices": None}, "models without a layer of attention are not supported"),
    ],
)  # fmt: skip
def test_other_hybrids_that_are_not_computed_are_refused(
    config: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(config | changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("time_step_limit", [0.0, 0.1], "time_step_limit = [0.0, 0.1] is not supported: time steps are not clamped"),
        ("time_step_limit", [0.001, math.inf], "time_step_limit = [0.001, inf] is not supported"),
        ("time_step_limit", "all", "time_step_limit = all is not supported"),
        ("mamba_d_head", 48, "mamba_d_head = 48, mamba_n_heads = 64: heads must have the 4096 columns of a Mamba-2"),
        ("mamba_n_heads", 60, "mamba_d_head = 64, mamba_n_heads = 60: heads must have the 4096 columns of a Mamba-2"),
        ("mamba_n_groups", 3, "64 heads do not divide among 3 groups"),
        ("mamba_d_state", 24, "states of 24 dimensions are not supported: multiples of 16 are"),
        ("mamba_d_conv", 17, "mamba_d_conv must be an integer from 1 to 16, got 17"),
        ("hidden_act", "gelu", "hidden_act must be one of silu, swish, got 'gelu'"),
        ("layer_types", ["mamba"], "layer_types has 1 entries for 40 layers"),
        ("position_embedding_type", "alibi", "position_embedding_type must be one of nope, rope, got 'alibi'"),
        ("layer_types", ["conv"], "layer_types must be a list of mamba or linear_attention or attention or full_"),
        ("layer_types", ["mamba"] * 40, "models without a layer of attention are not supported"),
        ("num_local_experts", -1, "num_local_experts must be an integer from 0 to 4096, got -1"),
        ("mlp_bias", True, "mlp_bias = True is not supported yet: its feed-forwards have no biases"),
    ],
)
def test_mamba_that_is_not_computed_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        spec_from_config(GRANITE_MICRO | {key: value})


def test_time_steps_without_limits_are_served_as_transformers_writes_them() -> None:
    plain = spec_from_config(GRANITE_MICRO)
    for limits in (None, [0.0, math.inf], [0, {"__float__": "Infinity"}]):
        assert spec_from_config(GRANITE_MICRO | {"time_step_limit": limits}) == plain


def test_cache_holds_what_is_counted_and_begins_as_zeros() -> None:
    small = spec(num_key_value_heads=2)
    cache = KVCache.allocate(KVGeometry.of(small, "bfloat16"), num_blocks=3, block_size=8, back_end=TORCH)
    tensors = [*cache.keys, *cache.values]
    assert {tuple(tensor.shape) for tensor in tensors} == {(3, 8, 2, 8)}
    assert sum(tensor.nbytes for tensor in tensors) == 3 * 8 * kv_bytes_per_token(small, 2)
    assert not any(tensor.any() for tensor in tensors)
    assert cache.block_size == 8
