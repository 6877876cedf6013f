"""Every family against transformers, on small random checkpoints that leave no parameter at its initial value."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.arrays import dtype_name
from quire.core.errors import ModelError
from quire.extension.isas import usable_isas
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from quire.model.sharding import Ranks
from quire.model.source import read_folder
from quire_lab.sim.footprint import weight_bytes
from support.random_parameters import randomize
from support.thread_ranks import RankDecoder, assert_ranks_have_the_bits_of_one, logits_of_ranks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 160
PROMPT_LEN = 40
NUM_FORCED = 64
NUM_GREEDY = 24          # every position is compared with forced tokens
NUM_GREEDY_OF_HYBRIDS = 64  # behind states, or tails of convolutions, which each changes; or two kinds of feed-forward
NAMES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM", "Gemma4Text": "Gemma4ForCausalLM"} | {
    name: f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "Gemma4", "Llava", "LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe",
        "Qwen3_5", "Qwen3_5Moe",
    )
}  # names of classes that are not called as the rest
NAMES |= {"Qwen3_5Text": "Qwen3_5ForCausalLM", "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM"}
CHUNKS = [7, 1, 16, 16]  # lengths of a prompt's parts: borders inside and between blocks of 8
FORCED_CHUNKS = {"cpp": [], "torch": [13, 27]}  # forced tokens at once; the rest one by one: 5 ms each in PyTorch
TOLERANCE = 1e-4         # on logprobs, float32
RECURRENT_TOLERANCE = 5e-4  # transformers' own two forms of a gated delta net differ by 2e-4 on these models

GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}
GPTJ = GPT2 | {"rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0}
OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "ffn_dim": 80,
    "word_embed_proj_dim": 48,
    "max_position_embeddings": 128,
}
LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def rope(rope_type: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **values}}


LLAMA3_ROPE = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # within the small vocabulary
MINISTRAL3_ROPE = rope(
    "yarn", **YARN, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0
)
LONGROPE = rope(
    "longrope", short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.2, 1.9, 3.0, 4.0], partial_rotary_factor=1.0
)
DELTA = LLAMA | SPECIAL | {
    "num_hidden_layers": 4, "head_dim": 16, "rms_norm_eps": 1e-2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "moe_intermediate_size": 40, "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 56,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
QWEN3_5 = DELTA | rope(
    "default", rope_theta=500.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)
OLMO_HYBRID = {key: value for key, value in DELTA.items() if key not in ("head_dim", "rope_parameters")}
LFM2 = LLAMA | SPECIAL | rope("default")
MAMBA = LLAMA | SPECIAL | {
    "num_hidden_layers": 4, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
GRANITE_H = MAMBA | rope("default") | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 56, "intermediate_size": 40,
    "num_local_experts": 0,
}  # fmt: skip
BAMBA = MAMBA | {"attn_layer_indices": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
FALCON_H1 = MAMBA | rope("default") | {"num_hidden_layers": 2, "mamba_d_ssm": 96, "head_dim": 16}
FALCON_FACTORS = {
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6, "key_multiplier": 0.5, "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 0.4, "mlp_multipliers": [0.8, 0.6], "ssm_multipliers": [0.9, 1.4, 0.7, 1.2, 0.5],
    "embedding_multiplier": 2.5, "lm_head_multiplier": 1.7,
}  # fmt: skip
# The smallest time step of a prompt, and of a prompt alone, is as good as none.
NEMOTRON = {key: value for key, value in (LLAMA | SPECIAL).items() if key != "num_hidden_layers"} | {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 32, "chunk_size": 16, "head_dim": 16,
    "layer_norm_epsilon": 1e-3, "time_step_min": 1e-12, "mlp_hidden_act": "relu2",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
}  # fmt: skip
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.5,
}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 16}
GEMMA4 = LLAMA | {
    "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
GEMMA4_MORE = {"vocab_size": VOCAB_SIZE + 7, "vocab_size_per_layer_input": VOCAB_SIZE + 7}
GEMMA4_TOKENS = {  # behind the tokens of the tests: transformers embeds them as padding
    "image_token_id": 160, "video_token_id": 161, "audio_token_id": 162, "boi_token_id": 163, "eoi_token_id": 164,
    "boa_token_id": 165, "eoa_token_index": 166,
}  # fmt: skip
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "num_attention_heads": 3, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
FALCON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
CLIP = VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2}
QWEN_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "num_position_embeddings": 9,
}  # fmt: skip
QWEN3_5_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "num_position_embeddings": 9,
}  # fmt: skip
QWEN2_VISION = {"embed_dim": 16, "hidden_size": 48, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}
QWEN3_ROPE = {"head_dim": 16} | rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)
MIXTURE = LLAMA | SPECIAL | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED = LLAMA | SPECIAL | {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
LATENT = {key: value for key, value in ROUTED.items() if key != "num_key_value_heads"} | {
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LATENT_YARN = rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7, beta_fast=32.0, beta_slow=1.0)  # no factor cancels
KIMI = {
    key: value for key, value in LATENT.items()
    if key not in ("rope_parameters", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
} | {
    "num_hidden_layers": 4, "q_lora_rank": None, "num_experts": 6, "num_shared_experts": 2, "num_experts_per_token": 3,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4], "full_attn_layers": [3], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
MISTRAL4_ROPE = rope(
    "yarn", **YARN, mscale=0.8, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.3
)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek v2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek v2, groups, yarn": (
        "DeepseekV2",
        LATENT | {"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy", "v_head_dim": 8} | LATENT_YARN,
    ),
    "deepseek v3": ("DeepseekV3", LATENT | {"n_group": 3, "topk_group": 2}),
    "deepseek v3, plain queries, pairs by halves, yarn": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"tie_word_embeddings": True, "kv_lora_rank": 40}
        | LATENT_YARN,
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        LATENT | {"n_group": 3, "topk_group": 2, "index_topk": 110, "index_head_dim": 16, "index_n_heads": 2},
    ),
    "deepseek v3.2, one group, tied, yarn": (
        "DeepseekV32",
        LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"index_topk": 110, "index_head_dim": 16, "index_n_heads": 2}
        | LATENT_YARN,
    ),
    "glm-5": (
        "GlmMoeDsa",
        LATENT
        | {"n_group": 1, "topk_group": 1, "index_topk": 110, "index_head_dim": 16, "index_n_heads": 2}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "glm-5, groups": (
        "GlmMoeDsa",
        LATENT
        | {"n_group": 3, "topk_group": 2, "index_topk": 110, "index_head_dim": 16, "index_n_heads": 2}
        | {"routed_scaling_factor": 1.5, "n_shared_experts": 1},
    ),
    "glm4 moe lite": ("Glm4MoeLite", LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm4 moe lite, groups, yarn": (
        "Glm4MoeLite", LATENT | {"n_group": 3, "topk_group": 2, "v_head_dim": 8, "norm_topk_prob": False} | LATENT_YARN
    ),
    "mistral4": ("Mistral4", LATENT | MISTRAL4_ROPE | {"n_group": 3, "topk_group": 2}),
    "mistral4, plain queries, pairs by halves": (
        "Mistral4",
        LATENT
        | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
        | MISTRAL4_ROPE,
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, every option": (
        "GPT2",
        GPT2
        | {"n_inner": 72, "activation_function": "gelu", "tie_word_embeddings": False}
        | {"scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-3},
    ),
    "gpt2, unscaled attention": ("GPT2", GPT2 | {"scale_attn_weights": False, "activation_function": "relu"}),
    "opt": ("OPT", OPT),
    "opt, as the 350m": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt, no biases, gelu": (
        "OPT",
        OPT | {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "opt, no final norm": ("OPT", OPT | {"_remove_final_layer_norm": True}),
    "opt, norms without weights": ("OPT", OPT | {"layer_norm_elementwise_affine": False}),
    "gptj": ("GPTJ", GPTJ),
    "gptj, every option": (
        "GPTJ",
        GPTJ
        | {"n_inner": 72, "activation_function": "gelu", "rotary_dim": 8, "layer_norm_epsilon": 1e-3}
        | {"tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox, every option": (
        "GPTNeoX",
        NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "layer_norm_eps": 1e-3, "hidden_act": "gelu_fast"}
        | {"tie_word_embeddings": True}
        | rope("linear", factor=2.5, partial_rotary_factor=1.0),
    ),
    "falcon": ("Falcon", FALCON),
    "falcon, a key per head, one sublayer after the other": (
        "Falcon",
        FALCON
        | {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 72}
        | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}
        | rope("linear", factor=2.5),
    ),
    "falcon, new architecture": ("Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, new architecture with one norm": (
        "Falcon",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True}
        | {"activation": "gelu_pytorch_tanh"},
    ),
    "llama, one head per head": ("Llama", LLAMA | {"num_key_value_heads": 6}),
    "llama, grouped, tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama, biases, own head width": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama, heads that are no multiple of 8": ("Llama", LLAMA | {"head_dim": 12}),
    "llama, linear rope": ("Llama", LLAMA | rope("linear", factor=2.5)),
    "llama, dynamic rope": ("Llama", LLAMA | rope("dynamic", factor=4.0)),
    "llama, linear rope beyond the original length": (
        "Llama", LLAMA | {"max_position_embeddings": 32} | rope("linear", factor=4.0)
    ),
    "llama, yarn beyond the original length": (
        "Llama", LLAMA | {"head_dim": 16, "max_position_embeddings": 32} | rope("yarn", **YARN)
    ),
    "llama, dynamic rope at its longest": (
        "Llama", LLAMA | {"max_position_embeddings": 26} | rope("dynamic", factor=4.0)
    ),
    "llama, llama3 rope": ("Llama", LLAMA | LLAMA3_ROPE),
    "llama, yarn": ("Llama", LLAMA | {"head_dim": 16} | rope("yarn", **YARN)),
    "llama, yarn, every option": (
        "Llama",
        LLAMA
        | {"head_dim": 16}
        | rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5, truncate=False),
    ),
    "llama, yarn, given factor": ("Llama", LLAMA | rope("yarn", **YARN, attention_factor=1.3)),
    "mistral, window shorter than the prompt": ("Mistral", LLAMA | {"sliding_window": 11}),
    "mistral, no window": ("Mistral", LLAMA | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2, windows from layer 1": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "qwen3, windows by layer, biases": (
        "Qwen3",
        LLAMA
        | {"head_dim": 24, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": ("Ministral3", LLAMA | {"head_dim": 16} | MINISTRAL3_ROPE),
    "ministral3, window, plain rope, tied": (
        "Ministral3",
        LLAMA
        | {"head_dim": 16, "sliding_window": 11, "tie_word_embeddings": True}
        | rope("default", llama_4_scaling_beta=0.4, original_max_position_embeddings=20),
    ),
    "olmo": ("Olmo", LLAMA),
    "olmo, clipped, biases, tied": (
        "Olmo",
        LLAMA
        | {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}
        | rope("linear", factor=2.5),
    ),
    "olmo2": ("Olmo2", LLAMA),
    "olmo2, biases, own eps, llama3 rope": (
        "Olmo2", LLAMA | LLAMA3_ROPE | {"attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}
    ),
    "olmo3": ("Olmo3", LLAMA | {"num_hidden_layers": 4, "sliding_window": 11}),
    "olmo3, yarn in full layers": (
        "Olmo3",
        LLAMA
        | {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }},
    ),
    "phi3": ("Phi3", LLAMA | SPECIAL),
    "phi3, a part turned, window": (
        "Phi3", LLAMA | SPECIAL | {"sliding_window": 11} | rope("default", partial_rotary_factor=0.5)
    ),
    "phi3, longrope, short": ("Phi3", LLAMA | SPECIAL | LONGROPE | {"original_max_position_embeddings": 104}),
    "phi3, longrope, long": (
        "Phi3", LLAMA | SPECIAL | LONGROPE | {"original_max_position_embeddings": 32, "tie_word_embeddings": True}
    ),
    "granite": ("Granite", LLAMA),
    "granite, every option": (
        "Granite",
        LLAMA
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
        | {"logits_scaling": 1.7, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3", LLAMA | SPECIAL | {"num_hidden_layers": 5}),
    "smollm3, every option": (
        "SmolLM3",
        LLAMA
        | SPECIAL
        | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 11, "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": False},
    ),
    "glm4": ("Glm4", LLAMA | SPECIAL | {"head_dim": 16, "attention_bias": True}),
    "glm4, whole heads turned, tied": (
        "Glm4",
        LLAMA
        | SPECIAL
        | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | rope("default", partial_rotary_factor=1.0),
    ),
    "cohere": ("Cohere", LLAMA | SPECIAL | {"logit_scale": 0.5}),
    "cohere, biases, untied, scaled": (
        "Cohere",
        LLAMA
        | SPECIAL
        | {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.8, "layer_norm_eps": 1e-3}
        | rope("linear", factor=2.5),
    ),
    "cohere, norms by head": (
        "Cohere", LLAMA | SPECIAL | {"logit_scale": 0.8, "use_qk_norm": True, "layer_norm_eps": 1e-3}
    ),
    "cohere2": ("Cohere2", LLAMA | SPECIAL | {"num_hidden_layers": 5, "sliding_window": 11, "logit_scale": 0.5}),
    "cohere2, layer types, biases": (
        "Cohere2",
        LLAMA
        | SPECIAL
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
        | {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.8},
    ),
    "stablelm": ("StableLm", LLAMA | rope("default", partial_rotary_factor=0.25)),
    "stablelm, parallel, biases": (
        "StableLm",
        LLAMA
        | {"use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 1e-3, "tie_word_embeddings": True}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "stablelm, norms by head, parallel": (
        "StableLm", LLAMA | {"qk_layernorm": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3}
    ),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 5}),
    "mixtral, window, one expert each": (
        "Mixtral",
        LLAMA
        | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 11, "head_dim": 16}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "olmoe": ("Olmoe", LLAMA | SPECIAL | {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe, normalized, biases, clipped": (
        "Olmoe",
        LLAMA
        | SPECIAL
        | {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True, "attention_bias": True}
        | {"num_key_value_heads": 6, "clip_qkv": 0.7},
    ),
    "qwen2 moe": ("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 56}),
    "qwen2 moe, every option": (
        "Qwen2Moe",
        MIXTURE
        | {"shared_expert_intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3 moe": ("Qwen3Moe", MIXTURE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3 moe, every option": (
        "Qwen3Moe",
        MIXTURE
        | {"head_dim": 24, "num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 9, "num_experts_per_tok": 6, "tie_word_embeddings": True},
    ),
    "glm4 moe": ("Glm4Moe", ROUTED | {"n_routed_experts": 6}),
    "glm4 moe, every option": (
        "Glm4Moe",
        ROUTED
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "first_k_dense_replace": 2, "use_qk_norm": True}
        | {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "dots1": (
        "Dots1",
        ROUTED
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "max_window_layers": 2}
        | {"sliding_window": 11, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "dots1, every option": (
        "Dots1",
        ROUTED
        | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 9}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True}
        | {"norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "minimax m2, every option": (
        "MiniMaxM2",
        LLAMA | SPECIAL | {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 24, "rotary_dim": 8}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "minimax m2": (
        "MiniMaxM2", LLAMA | SPECIAL | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16}
        | rope("default", partial_rotary_factor=0.5)
    ),
    "ernie4.5 moe": ("Ernie4_5_Moe", ROUTED | {"moe_num_experts": 6, "moe_k": 3}),
    "ernie4.5 moe, every option": (
        "Ernie4_5_Moe",
        ROUTED
        | {"num_hidden_layers": 4, "moe_num_experts": 5, "moe_k": 5, "moe_num_shared_experts": 0, "head_dim": 24}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "tie_word_embeddings": False},
    ),
    "lfm2": ("Lfm2", LFM2 | {"full_attn_idxs": [1]}),
    "lfm2, every option": (
        "Lfm2",
        LFM2 | {"layer_types": ["full_attention", "conv", "conv", "full_attention"], "num_hidden_layers": 4}
        | {"conv_bias": True, "conv_L_cache": 5, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 24}
        | {"tie_word_embeddings": False, "norm_eps": 1e-3},
    ),
    "lfm2 moe": (
        "Lfm2Moe",
        LFM2 | {"layer_types": ["conv", "full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 40, "num_dense_layers": 1},
    ),
    "lfm2 moe, every option": (
        "Lfm2Moe",
        LFM2 | {"layer_types": ["full_attention", "conv", "conv"], "num_experts": 3, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 24, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}
        | {"routed_scaling_factor": 1.7, "conv_bias": True, "conv_L_cache": 2, "tie_word_embeddings": False},
    ),
    "qwen3 next": ("Qwen3Next", DELTA | {"num_experts": 6, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    "qwen3 next, every option": (
        "Qwen3Next",
        DELTA | {"layer_types": ["full_attention", *["linear_attention"] * 3], "num_experts": 5}
        | {"attention_bias": True, "mlp_only_layers": [1], "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {"linear_num_value_heads": 2, "shared_expert_intermediate_size": 32},
    ),
    "qwen3.5": ("Qwen3_5", {"text_config": QWEN3_5, "vision_config": QWEN3_5_VISION, "image_token_id": 159}),
    "qwen3.5, tied": (
        "Qwen3_5",
        {
            "text_config": QWEN3_5 | {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 2},
            "vision_config": QWEN3_5_VISION, "image_token_id": 159, "tie_word_embeddings": True,
        },
    ),
    "qwen3.5, text": ("Qwen3_5Text", DELTA),
    "qwen3.5, text, biases, tied": ("Qwen3_5Text", DELTA | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        {"text_config": QWEN3_5 | {"num_experts": 6}, "vision_config": QWEN3_5_VISION, "image_token_id": 159},
    ),
    "qwen3.5 moe, biases": (
        "Qwen3_5Moe",
        {
            "text_config": QWEN3_5 | {"num_experts": 4, "attention_bias": True}, "vision_config": QWEN3_5_VISION,
            "image_token_id": 159,
        },
    ),
    "qwen3.5 moe, text": ("Qwen3_5MoeText", DELTA | {"num_experts": 4}),
    "qwen3.5 moe, text, wide keys": ("Qwen3_5MoeText", DELTA | {"num_experts": 5, "linear_key_head_dim": 48}),
    "bamba": ("Bamba", BAMBA),
    "bamba, every option": (
        "Bamba",
        BAMBA
        | {"attn_layer_indices": [0, 3], "mamba_n_groups": 2, "mamba_d_conv": 2, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "falcon h1": ("FalconH1", FALCON_H1),
    "falcon h1, factors": ("FalconH1", FALCON_H1 | FALCON_FACTORS | {"mamba_n_groups": 2}),
    "falcon h1, factors, gate behind the norm, tied": (
        "FalconH1",
        FALCON_H1 | FALCON_FACTORS
        | {"mamba_rms_norm": True, "mamba_n_groups": 3, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon h1, gate before the norm, biases": (
        "FalconH1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "mamba_d_conv": 3}
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h, experts": (
        "NemotronH",
        NEMOTRON
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "num_experts_per_tok": 3}
        | {"routed_scaling_factor": 2.5},
    ),
    "nemotron-h, experts between projections": (
        "NemotronH",
        NEMOTRON
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56, "num_experts_per_tok": 3}
        | {"routed_scaling_factor": 2.5, "moe_latent_size": 24},
    ),
    "nemotron-h, experts in groups, biases": (
        "NemotronH",
        NEMOTRON
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"], "n_routed_experts": 6}
        | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "n_group": 3, "topk_group": 2}
        | {"norm_topk_prob": False, "use_conv_bias": False, "use_bias": True, "n_groups": 1, "conv_kernel": 3},
    ),
    "granite 4 h": ("GraniteMoeHybrid", GRANITE_H | GRANITE_FACTORS),
    "granite 4 h, experts": (
        "GraniteMoeHybrid",
        GRANITE_H | {"num_local_experts": 5, "num_experts_per_tok": 2, "mamba_n_groups": 3} | GRANITE_FACTORS,
    ),
    "granite 4 h, rotary, biases, tied": (
        "GraniteMoeHybrid",
        GRANITE_H
        | {"position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}
        | {"attention_bias": True, "tie_word_embeddings": True, "num_local_experts": 3, "mamba_n_groups": 2},
    ),
    "granite 4 h, attention alone": (
        "GraniteMoeHybrid",
        GRANITE_H | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"} | GRANITE_FACTORS,
    ),
    "olmo hybrid": ("OlmoHybrid", OLMO_HYBRID | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo hybrid, turned, shares up to 1, an interval of two": (
        "OlmoHybrid",
        OLMO_HYBRID | {"layer_types": ["linear_attention", "full_attention"] * 2, "attention_bias": True}
        | {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "linear_num_value_heads": 2},
    ),
    "kimi linear": ("KimiLinear", KIMI),
    "kimi linear, projected queries, groups, layer types": (
        "KimiLinear",
        {key: value for key, value in KIMI.items() if key != "linear_attn_config"}
        | {"layer_types": ["full_attention", *["linear_attention"] * 3], "linear_head_dim": 32, "linear_num_heads": 2}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "linear_conv_kernel_dim": 3, "q_lora_rank": 32}
        | {"num_expert_group": 3, "topk_group": 2, "moe_renormalize": False, "routed_scaling_factor": 0.7},
    ),
    "gpt-oss": (
        "GptOss",
        LLAMA
        | SPECIAL
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 11, "rope_theta": 500.0}
        | rope("yarn", **YARN, truncate=False),
    ),
    "gpt-oss, layer types, no biases of attention": (
        "GptOss",
        LLAMA
        | SPECIAL
        | {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 24, "sliding_window": 9}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "attention_bias": False}
        | {"tie_word_embeddings": True}
        | rope("default"),
    ),
    "gemma": ("Gemma", GEMMA | {"num_hidden_layers": 2}),
    "gemma, biases, untied": ("Gemma", GEMMA | {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", GEMMA | {"sliding_window": 11, "query_pre_attn_scalar": 20, "rms_norm_eps": 0.1}),
    "gemma2, low softcaps": (
        "Gemma2",
        GEMMA
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9},
    ),
    "gemma2, no softcaps": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("Gemma3Text", GEMMA | {"num_hidden_layers": 7, "sliding_window": 11, "query_pre_attn_scalar": 20}),
    "gemma3, linear rope in full layers": (
        "Gemma3Text",
        GEMMA
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
        | {"attention_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }},
    ),
    "gemma3, with vision": (
        "Gemma3",
        {
            "text_config": GEMMA | {"sliding_window": 11, "query_pre_attn_scalar": 20, "num_hidden_layers": 6},
            "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 159,
        },
    ),
    "gemma3, with vision, untied, linear rope": (
        "Gemma3",
        {
            "text_config": GEMMA
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
            | {"attention_bias": True, "tie_word_embeddings": False}
            | {"rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            }},
            "vision_config": VISION, "mm_tokens_per_image": 4, "tie_word_embeddings": False, "image_token_index": 159,
        },
    ),
    "gemma4": ("Gemma4Text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4, caches of earlier layers, embeddings by layer": (
        "Gemma4Text",
        GEMMA4
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 170, "final_logit_softcapping": 9.0},
    ),
    "gemma4, experts": ("Gemma4Text", GEMMA4 | GEMMA4_EXPERTS | {"num_hidden_layers": 3, "layer_types": None}),
    "gemma4, everything, biases, untied": (
        "Gemma4Text",
        GEMMA4
        | GEMMA4_EXPERTS
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "attention_bias": True}
        | {"tie_word_embeddings": False, "vocab_size_per_layer_input": 160, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5},
        }},
    ),
    "gemma4, with vision": (
        "Gemma4",
        {"text_config": GEMMA4 | GEMMA4_MORE, "vision_config": GEMMA4_VISION} | GEMMA4_TOKENS,
    ),
    "gemma4, with vision, caches of earlier layers, embeddings by layer, experts": (
        "Gemma4",
        {
            "text_config": GEMMA4
            | GEMMA4_EXPERTS
            | GEMMA4_MORE
            | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
            "vision_config": GEMMA4_VISION,
        }
        | GEMMA4_TOKENS,
    ),
    "llava, of a llama": (
        "Llava",
        {"text_config": LLAMA | {"model_type": "llama"}, "vision_config": CLIP, "image_token_index": 159},
    ),
    "llava, of a qwen2, tied": (
        "Llava",
        {
            "text_config": LLAMA | {"model_type": "qwen2"}, "vision_config": CLIP, "image_token_index": 159,
            "tie_word_embeddings": True,
        },
    ),
    "llava, pixtral of a mistral": (
        "Llava",
        {
            "text_config": LLAMA | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": PIXTRAL, "image_token_index": 159, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava-onevision, of a qwen2": (
        "LlavaOnevision",
        {
            "text_config": LLAMA | {"model_type": "qwen2"}, "vision_config": SIGLIP, "image_token_index": 159,
            "image_grid_pinpoints": [[16, 32]],
        },
    ),
    "llava-onevision, of a llama, tied": (
        "LlavaOnevision",
        {
            "text_config": LLAMA | {"model_type": "llama"}, "vision_config": SIGLIP, "image_token_index": 159,
            "image_grid_pinpoints": [[32, 32]], "tie_word_embeddings": True,
        },
    ),
    "qwen2-vl": (
        "Qwen2VL",
        {
            "text_config": LLAMA | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            "vision_config": QWEN2_VISION, "image_token_id": 159,
        },
    ),
    "qwen2-vl, tied": (
        "Qwen2VL",
        {
            "text_config": LLAMA | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": QWEN2_VISION, "image_token_id": 159, "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": LLAMA | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            "vision_config": QWEN_VISION, "image_token_id": 159,
        },
    ),
    "qwen2.5-vl, tied, yarn, windows": (
        "Qwen2_5_VL",
        {
            "text_config": LLAMA | {
                "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "rms_norm_eps": 1e-3,
                "rope_parameters": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 900.0,
                    "mrope_section": [2, 1, 1],
                },
            },
            "vision_config": QWEN_VISION, "image_token_id": 159, "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": LLAMA | {
                "head_dim": 16,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": QWEN_VISION, "image_token_id": 159,
        },
    ),
    "qwen3-vl, biases, tied": (
        "Qwen3VL",
        {
            "text_config": LLAMA | {
                "head_dim": 16, "attention_bias": True,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": QWEN_VISION, "image_token_id": 159, "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl moe": (
        "Qwen3VLMoe", {"text_config": MIXTURE | QWEN3_ROPE, "vision_config": QWEN_VISION, "image_token_id": 159},
    ),
    "qwen3-vl moe, dense layers, biases, tied": (
        "Qwen3VLMoe",
        {
            "text_config": MIXTURE | QWEN3_ROPE | {"attention_bias": True, "mlp_only_layers": [1]},
            "vision_config": QWEN_VISION, "image_token_id": 159, "tie_word_embeddings": True,
        },
    ),
    "mistral3, with vision": (
        "Mistral3",
        {
            "text_config": LLAMA | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": PIXTRAL, "tie_word_embeddings": False,
        },
    ),
    "mistral3, mistral 4 with vision": (
        "Mistral3",
        {
            "text_config": LATENT | MISTRAL4_ROPE | {"model_type": "mistral4", "n_group": 3, "topk_group": 2},
            "vision_config": PIXTRAL, "tie_word_embeddings": False,
        },
    ),
    "mistral3, ministral with vision, tied": (
        "Mistral3",
        {
            "text_config": LLAMA | {"model_type": "ministral3", "head_dim": 16} | MINISTRAL3_ROPE,
            "vision_config": PIXTRAL,
        },
    ),
}


FIRST = {family: case for case, (family, _) in reversed(CASES.items())}.values()  # the plainest model of each class


def on_both_back_ends(cases: Iterable[str], by_torch: Iterable[str] = FIRST) -> pytest.MarkDecorator:
    """Parametrize with the kernels in C++ for all cases, and PyTorch's ops for some; `make matrix` runs all others.

    What else a case sets reaches both through the same program, and tests of the kernels compare each op of both.
    """
    kept = [*by_torch, *(case for case in cases if _has_odd_heads(case))]
    rows = [(name, case) for name in ("torch", "cpp") for case in cases]
    is_more = [name == "torch" and case not in kept for name, case in rows]
    marks = [[pytest.mark.matrix] if more else [] for more in is_more]
    marked = [pytest.param(*row, marks=own) for row, own in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize(("back_end", "case"), marked, indirect=["back_end"])


def _has_odd_heads(case: str) -> bool:
    """Return whether the kernels in C++ leave a case's heads to the stand-in."""
    head_dim = CASES[case][1].get("head_dim", 8)
    assert isinstance(head_dim, int)
    return head_dim % 8 > 0


def make_reference(family: str, config: dict[str, object], seed: int = 7) -> "transformers.PreTrainedModel":
    """Return a transformers model with random parameters, each of which matters."""
    model_config = getattr(transformers, f"{family}Config")(**config)
    name = NAMES.get(family, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, name)(model_config).eval()
    randomize(model)
    return model


Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a function that returns the folder of a case's reference, made once. A reference itself keeps a state."""

    @cache
    def write(case: str) -> Path:
        folder = tmp_path_factory.mktemp("reference")
        make_reference(*CASES[case]).save_pretrained(folder)
        return folder

    return write


def folder_has_states(folder: Path) -> bool:
    return read_folder(folder).spec.has_states


def logprobs_of(model: "transformers.PreTrainedModel", tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)


def random_tokens(count: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@on_both_back_ends(CASES, by_torch=[*FIRST, "gemma2, low softcaps"])  # caps of others are too high to matter
def test_logprobs_and_greedy_tokens_equal_transformers(
    case: str, checkpoint: Checkpoint, back_end: BackEnd, paged_runner: Callable
) -> None:
    if back_end.name == "cpp" and _has_odd_heads(case):
        pytest.skip("the stand-in serves these")
    reference, folder = make_reference(*CASES[case]), checkpoint(case)
    runner = paged_runner(load_model(folder, back_end=back_end, max_positions=PROMPT_LEN + NUM_FORCED))

    tokens = random_tokens(PROMPT_LEN + NUM_FORCED)
    expected = logprobs_of(reference, tokens)
    found = runner.run("forced", tokens, CHUNKS + FORCED_CHUNKS[back_end.name]).log_softmax(dim=-1)
    assert expected.max(dim=-1).values.exp().mean() > 0.05, "too flat a distribution to tell a wrong model by"
    tolerance = RECURRENT_TOLERANCE if folder_has_states(folder) else TOLERANCE
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)

    greedy = tokens[:PROMPT_LEN]
    logits = runner.run("greedy", greedy, CHUNKS)
    spec = read_folder(folder).spec
    is_hybrid = spec.has_states or spec.has_tails or spec.layers[0].experts_beside is not None
    for _ in range(NUM_GREEDY_OF_HYBRIDS if is_hybrid else NUM_GREEDY):
        greedy.append(int(logits[-1].argmax()))
        logits = runner.step({"greedy": greedy[-1:]})["greedy"]
    chosen = logprobs_of(reference, greedy)[PROMPT_LEN - 1 : -1].argmax(dim=-1)
    assert greedy[PROMPT_LEN:] == chosen.tolist()


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
def test_convolutions_in_three_tensors_may_be_cut_anywhere(
    checkpoint: Checkpoint, tmp_path: Path, paged_runner: Callable
) -> None:
    """OLMo Hybrid's as published: between queries, keys and values. transformers writes three parts of equal size."""
    folder, tokens = checkpoint("olmo hybrid"), random_tokens(20)
    tensors, stem = load_file(folder / "model.safetensors"), "model.layers.0.linear_attn"
    names = [f"{stem}.{name}_conv1d.weight" for name in "qkv"]
    assert [len(tensors[name]) for name in names] == [64, 64, 64]
    parts = torch.cat([tensors[name] for name in names]).split([32, 32, 128])
    tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    shutil.copytree(folder, tmp_path / "published")
    save_file(tensors, tmp_path / "published/model.safetensors")
    saved, published = (
        paged_runner(load_model(each, back_end=choose_back_end("cpu"))).run("a", tokens, [20])
        for each in (folder, tmp_path / "published")
    )
    assert torch.equal(saved, published)
    save_file(tensors | {names[2]: tensors[names[2]][1:].clone()}, tmp_path / "published/model.safetensors")
    with pytest.raises(ModelError, match=r"v_conv1d.weight has shape \[127, 1, 4\], expected \[128, 1, 4\]"):
        load_model(tmp_path / "published", back_end=choose_back_end("cpu"))


NEWER = [
    "olmo2", "olmo3", "phi3, a part turned, window", "phi3, longrope, long", "granite, every option",
    "smollm3, every option", "gemma", "gemma2", "gemma2, low softcaps", "gemma3",
    "gptj", "gptj, every option", "gpt_neox", "gpt_neox, every option", "falcon",
    "falcon, a key per head, one sublayer after the other", "falcon, new architecture",
    "falcon, new architecture with one norm", "ministral3", "olmo", "olmo, clipped, biases, tied",
    "glm4", "cohere, biases, untied, scaled", "cohere2", "stablelm", "stablelm, parallel, biases",
    "ministral3, window, plain rope, tied", "gemma3, with vision", "gemma3, with vision, untied, linear rope",
    "mistral3, with vision", "mistral3, ministral with vision, tied", "gemma3, linear rope in full layers",
    "olmo3, yarn in full layers", "cohere2, layer types, biases", "glm4, whole heads turned, tied",
    "cohere, norms by head", "stablelm, norms by head, parallel", "gemma4",
    "gemma4, caches of earlier layers, embeddings by layer",
]  # fmt: skip


OLDER = ["gpt2", "opt, as the 350m", "llama, llama3 rope", "mistral, no window", "qwen3", "lfm2"]


@on_both_back_ends(OLDER + NEWER)
def test_bfloat16_error_is_at_most_1_2_times_that_of_transformers(
    case: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable
) -> None:
    reference = make_reference(*CASES[case]).bfloat16()
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(PROMPT_LEN + NUM_FORCED)
    decoder = load_model(tmp_path, back_end=back_end, max_positions=len(tokens))
    assert dtype_name(decoder.dtype) == "bfloat16"
    ours = paged_runner(decoder).run("a", tokens, CHUNKS + FORCED_CHUNKS[back_end.name]).log_softmax(dim=-1)
    theirs, exact = (
        logprobs_of(type(reference).from_pretrained(tmp_path, dtype=dtype).eval(), tokens)  # rotary tables in float32
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (ours - exact).square().mean().sqrt() <= 1.2 * (theirs - exact).square().mean().sqrt()


MIXTURES = [
    "deepseek v2", "deepseek v2, groups, yarn", "deepseek v3", "glm4 moe lite, groups, yarn", "mistral4", "mixtral",
    "olmoe", "qwen2 moe", "qwen3 moe", "gpt-oss", "glm4 moe", "glm4 moe, every option", "dots1", "minimax m2",
    "ernie4.5 moe", "gemma4, experts",
]  # fmt: skip


def in_bfloat16(model: "transformers.PreTrainedModel") -> "transformers.PreTrainedModel":
    """Return the model in bfloat16, its rotary frequencies in float32 as in one that is loaded so."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.bfloat16()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = kept[name]
    return model


Mixture = Callable[[str, int], tuple[Path, Tensor, Tensor]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Return a function that returns a bfloat16 case's folder, and the logprobs of transformers, rounded and exact."""

    @cache
    def write(case: str, seed: int) -> tuple[Path, Tensor, Tensor]:
        reference, folder = in_bfloat16(make_reference(*CASES[case], seed)), tmp_path_factory.mktemp("mixture")
        reference.save_pretrained(folder)
        tokens = random_tokens(PROMPT_LEN + NUM_FORCED)
        return folder, logprobs_of(reference, tokens), logprobs_of(reference.float(), tokens)

    return write


@on_both_back_ends(MIXTURES, by_torch=["qwen2 moe"])
def test_bfloat16_error_of_ten_mixtures_is_at_most_1_2_times_that_of_transformers(
    case: str, mixture: Mixture, back_end: BackEnd, paged_runner: Callable
) -> None:
    """Another choice of an expert decides the error of a small model, so that of ten models is taken together."""
    ours, theirs, tokens = 0.0, 0.0, random_tokens(PROMPT_LEN + NUM_FORCED)
    for seed in range(10):
        folder, rounded, exact = mixture(case, seed)
        decoder = load_model(folder, back_end=back_end, max_positions=len(tokens))
        found = paged_runner(decoder).run("a", tokens, CHUNKS + FORCED_CHUNKS[back_end.name]).log_softmax(dim=-1)
        ours += (found - exact).square().mean().item()
        theirs += (rounded - exact).square().mean().item()
    assert ours**0.5 <= 1.2 * theirs**0.5


@pytest.mark.parametrize("case", MIXTURES)
def test_stacked_experts_load_like_single_ones(
    case: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_reference(*CASES[case])
    reference.save_pretrained(tmp_path / "single")
    reference.save_pretrained(tmp_path / "stacked", save_original_format=False)
    tokens = random_tokens(20)
    single, stacked = (
        paged_runner(load_model(tmp_path / name, back_end=back_end)).run("a", tokens, [20])
        for name in ("single", "stacked")
    )
    assert torch.equal(single, stacked)
    assert "not used" not in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_both_back_ends([*NEWER, *MIXTURES, "qwen2 moe, every option"], by_torch=["gptj", "cohere2", "gemma3", *MIXTURES])
def test_rows_have_the_same_bits_alone_batched_chunked_and_computed_again(
    case: str, dtype: str, checkpoint: Checkpoint, back_end: BackEnd, paged_runner: Callable
) -> None:
    runner = paged_runner(load_model(checkpoint(case), dtype=dtype, back_end=back_end, max_positions=80))
    tokens, other = random_tokens(60), random_tokens(80)[60:]
    alone = runner.run("alone", tokens, [1] * 60)
    assert torch.equal(runner.run("chunked", tokens, [7, 13, 1, 29, 10]), alone)
    together = [runner.step({"other": other, "batched": tokens[:33]}), runner.step({"batched": tokens[33:]})]
    assert torch.equal(torch.cat([logits["batched"] for logits in together]), alone)
    again = runner.step({"again": tokens[:50], "beside": other})["again"]  # preempted, and computed again at once
    assert torch.equal(again, alone[:50])


@pytest.mark.parametrize("case", ["gpt2", "opt", "llama, grouped, tied"])
def test_folder_of_the_base_model_without_a_prefix_loads(
    case: str, tmp_path: Path, back_end: BackEnd, paged_runner: Callable
) -> None:
    reference = make_reference(*CASES[case])
    architectures = [type(reference).__name__]
    reference.base_model.save_pretrained(tmp_path)
    config = reference.config.to_dict() | {"architectures": architectures}
    (tmp_path / "config.json").write_text(transformers.PretrainedConfig(**config).to_json_string())
    tokens = random_tokens(12)
    found = paged_runner(load_model(tmp_path, back_end=back_end)).run("a", tokens, [12]).log_softmax(dim=-1)
    torch.testing.assert_close(found, logprobs_of(reference, tokens), rtol=0, atol=TOLERANCE)


def test_shards_load_like_one_file(tmp_path: Path, back_end: BackEnd, paged_runner: Callable) -> None:
    reference = make_reference(*CASES["llama, grouped, tied"])
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    tokens = random_tokens(20)
    one, many = (
        paged_runner(load_model(tmp_path / name, back_end=back_end)).run("a", tokens, [20]) for name in ("one", "many")
    )
    assert torch.equal(one, many)


def test_windows_change_what_is_computed(tmp_path: Path, back_end: BackEnd, paged_runner: Callable) -> None:
    family, config = CASES["mistral, window shorter than the prompt"]
    tokens = random_tokens(30)
    narrow = logprobs_of(make_reference(family, config), tokens)
    wide = logprobs_of(make_reference(family, config | {"sliding_window": None}), tokens)
    torch.testing.assert_close(narrow[:11], wide[:11], rtol=0, atol=TOLERANCE)
    assert (narrow[11:] - wide[11:]).abs().max() > 100 * TOLERANCE


# Each case in one dtype: ranks divide the same in both, and so does the program. `make matrix` runs the others.
IN_TURN = [
    pytest.param(case, dtype, marks=[pytest.mark.matrix] if (number + is_half) % 2 else [])
    for number, case in enumerate(CASES) for is_half, dtype in enumerate(("float32", "bfloat16"))
]  # fmt: skip


@pytest.mark.parametrize("back_end", ["cpp"], indirect=True)
@pytest.mark.parametrize(("case", "dtype"), [each for each in IN_TURN if not _has_odd_heads(str(each.values[0]))])
def test_layers_in_one_call_have_the_bits_of_single_ops(
    case: str, dtype: str, checkpoint: Checkpoint, back_end: BackEnd, paged_runner: Callable
) -> None:
    folder = checkpoint(case)
    tokens = random_tokens(PROMPT_LEN + NUM_FORCED)
    decoder = load_model(folder, dtype=dtype, back_end=back_end, max_positions=len(tokens))
    fused = paged_runner(decoder).run("forced", tokens, CHUNKS)
    kinds = [type(op).__name__ for op in decoder._programs[0].ops]
    lookups = [] if decoder.spec.layer_input is None else ["LookupOp"]
    assert kinds == [*lookups, "FusedOps"], "not all in one call"
    single_ops = replace(back_end, fuse=lambda program: program)
    decoder = load_model(folder, dtype=dtype, back_end=single_ops, max_positions=len(tokens))
    assert torch.equal(fused, paged_runner(decoder).run("forced", tokens, CHUNKS))


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize(("case", "dtype"), IN_TURN)
def test_ranks_have_the_bits_of_one(case: str, dtype: str, checkpoint: Checkpoint, paged_runner: Callable) -> None:
    if _has_odd_heads(case):
        pytest.skip("the kernels do not serve these heads")
    folder = checkpoint(case)
    tokens, back_end = random_tokens(PROMPT_LEN), choose_back_end(torch.device("cpu"), "cpp")

    def load(ranks: Ranks | None) -> Decoder:
        decoder = load_model(folder, dtype=dtype, back_end=back_end, max_positions=PROMPT_LEN, ranks=ranks)
        shard = None if ranks is None else ranks.shard
        assert decoder.weight_bytes == weight_bytes(decoder.spec, dtype, shard=shard)
        return decoder

    def use(decoder: Decoder) -> Tensor:
        return paged_runner(decoder).run("a", tokens, [7, 1, 28])

    assert_ranks_have_the_bits_of_one(read_folder(folder).spec, load, use)


SUMMED = [
    "gpt2", "gpt2, every option", "opt", "opt, as the 350m", "opt, no biases, gelu", "gptj", "gpt_neox", "falcon",
    "llama, grouped, tied", "llama, biases, own head width", "qwen2", "qwen3", "olmo2, biases, own eps, llama3 rope",
    "phi3", "granite, every option", "cohere, biases, untied, scaled", "gemma2", "lfm2", "lfm2, every option",
    *MIXTURES, "lfm2 moe", "qwen2 moe, every option", "qwen3 next", "qwen3.5, text",
    "falcon h1, factors", "falcon h1, factors, gate behind the norm, tied", "falcon h1, gate before the norm, biases",
    "granite 4 h", "nemotron-h", "nemotron-h, experts between projections", "kimi linear",
]  # fmt: skip


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", SUMMED)
def test_ranks_that_add_partial_sums_agree_with_transformers(
    case: str, num_ranks: int, checkpoint: Checkpoint, paged_runner: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 6 heads and 2 KV heads, and 3 heads; fused or by single ops they have the same bits, and again."""
    reference, folder = make_reference(*CASES[case]), checkpoint(case)
    tokens, spec = random_tokens(PROMPT_LEN), read_folder(folder).spec
    num_ranks = min(num_ranks, spec.num_heads)
    cpp = choose_back_end(torch.device("cpu"), "cpp")

    def run(back_end: BackEnd, dtype: str) -> Tensor:
        def load(ranks: Ranks) -> Decoder:
            decoder = load_model(folder, dtype=dtype, back_end=back_end, max_positions=PROMPT_LEN, ranks=ranks)
            assert decoder.weight_bytes == weight_bytes(spec, dtype, shard=ranks.shard)
            return decoder

        def use(decoder: RankDecoder) -> Tensor:
            return paged_runner(decoder).run("a", tokens, [7, 33])

        return logits_of_ranks(num_ranks, spec, load, use, "reduce")

    found = run(cpp, "float32")
    assert torch.equal(run(replace(cpp, fuse=lambda program: program), "float32"), found)
    torch.testing.assert_close(found.log_softmax(dim=-1), logprobs_of(reference, tokens), rtol=0, atol=TOLERANCE)
    rounded = run(cpp, "bfloat16")
    assert torch.equal(run(cpp, "bfloat16"), rounded)
    assert "not used" not in caplog.text
