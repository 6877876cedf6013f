"""Architectures of GGUF files: their metadata as the keys of config.json, and llama.cpp's names of their tensors.

Where a family has a choice that the metadata does not name (biases, norms, a tied head), the tensor table decides.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.formats.gguf import experts
from quire.formats.gguf.metadata import Metadata
from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS
from quire.model.spec import WeightMap

ROPE_FREQS = "rope_freqs.weight"
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
LAYER_NORM_EPS = "attention.layer_norm_epsilon"
QUERY_BIAS = "blk.0.attn_q.bias"
_LLAMA_WEIGHTS = WeightMap(
    prefixes=("",),
    layer="blk.{layer}.",
    embedding="token_embd",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_out="attn_output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    feed_forward_norm="ffn_norm",
    feed_forward_in=("ffn_gate", "ffn_up"),
    feed_forward_out="ffn_down",
    final_norm="output_norm",
    head="output",
    harmless=(ROPE_FREQS, "attn_rot_embd.weight", "attn.rot_embd"),
)
_EXPERT_KEYS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}  # fmt: skip
_EXPERT_WEIGHTS = replace(_LLAMA_WEIGHTS, experts=experts.NAMES)
_OLMO2_WEIGHTS = replace(_LLAMA_WEIGHTS, attention_norm="post_attention_norm", feed_forward_norm="post_ffw_norm")
_GEMMA2_WEIGHTS = replace(
    _LLAMA_WEIGHTS, attention_output_norm="post_attention_norm", feed_forward_output_norm="post_ffw_norm"
)
_PHI3_WEIGHTS = replace(_LLAMA_WEIGHTS, qkv=("attn_qkv",), feed_forward_in=("ffn_up",))
_GLM4_WEIGHTS = replace(_GEMMA2_WEIGHTS, feed_forward_in=("ffn_up",))
_GPT2_WEIGHTS = replace(_PHI3_WEIGHTS, positions="position_embd")
# Falcon with a norm for each of its parallel sublayers.
_FALCON_WEIGHTS = replace(_GPT2_WEIGHTS, positions=None, attention_norm="attn_norm_2", feed_forward_norm="attn_norm")
_GPT_OSS_WEIGHTS = replace(_EXPERT_WEIGHTS, feed_forward_norm="post_attention_norm", sinks="attn_sinks.weight")


class Architecture(NamedTuple):
    """An architecture of GGUF: `to_config` makes config.json's keys; `has_permuted_heads` as of `permuted_tensors`.

    `reads`: keys that other architectures refuse. `has_raised_norms`: the weights of norms are stored plus 1. `flags`:
    config.json's flags that are true where the file has a tensor.
    """

    to_config: Callable[["Metadata"], dict[str, object]]
    weights: WeightMap
    has_permuted_heads: bool = False
    reads: tuple[str, ...] = ()
    has_raised_norms: bool = False
    flags: Mapping[str, str] = {}


def _llama(metadata: Metadata) -> dict[str, object]:
    config = _of_family(metadata, "MixtralForCausalLM")
    if "num_experts" in config:
        return config
    config["architectures"] = ["LlamaForCausalLM"]
    if metadata.has("attention.sliding_window"):
        window = metadata.size("attention.sliding_window", least=0)
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window or None}
    return config


def _of_family(
    metadata: Metadata, family: str, *, is_normalized: bool = True, turns_part: bool = False, eps: str = "rms_norm_eps"
) -> dict[str, object]:
    """Return the keys of a family with rotary positions; `is_normalized` is about the weights of experts."""
    config = _rotary_decoder(metadata, turns_part=turns_part, eps=eps) | {"architectures": [family]}
    if not (metadata.has("expert_count") and metadata.size("expert_count", least=0)):
        return config
    sizes = {name: metadata.size(key) for key, name in _EXPERT_KEYS.items() if metadata.has(key)}
    return config | sizes | {"num_experts_per_tok": metadata.size("expert_used_count"), "norm_topk_prob": is_normalized}


def _granite(metadata: Metadata) -> dict[str, object]:
    config = _llama(metadata) | {"architectures": ["GraniteForCausalLM"]}
    config["attention_multiplier"] = metadata.number("attention.scale", int(str(config["head_dim"])) ** -0.5)
    for key, name in (("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier"),
                      ("logit_scale", "logits_scaling")):  # fmt: skip
        config[name] = metadata.number(key, 1.0)
    return config


def _olmo2(metadata: Metadata) -> dict[str, object]:
    metadata.reject("attention.sliding_window", 0, why="OLMo 3 is not read from GGUF files")
    return _rotary_decoder(metadata) | {"architectures": ["Olmo2ForCausalLM"]}


def _phi3(metadata: Metadata) -> dict[str, object]:
    if any(name.startswith("rope_factors_") for name in metadata.file.tensors):
        raise metadata.file.error("longrope is not read from GGUF files yet, and the file has its factors")
    window = metadata.size("attention.sliding_window", 0, least=0) or None
    config = _rotary_decoder(metadata, turns_part=True)
    return config | {"architectures": ["Phi3ForCausalLM"], "sliding_window": window}


def _gemma2(metadata: Metadata) -> dict[str, object]:
    config = _rotary_decoder(metadata)
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": _score_scalar(metadata, config, GEMMA2_27B_LAYERS),
    }


def _gemma3(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Gemma 3. Files name neither the factor on scores nor, older ones, windowed layers' base."""
    metadata.reject("attention.sliding_window_pattern", 6, why="every sixth layer of Gemma 3 has no window")
    config = _rotary_decoder(metadata) | {"architectures": ["Gemma3ForCausalLM"]}
    return config | {
        "sliding_window": metadata.size("attention.sliding_window"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _score_scalar(metadata, config, GEMMA3_27B_LAYERS),
    }


def _score_scalar(metadata: Metadata, config: Mapping[str, object], layers_of_27b: int) -> object:
    """Return a Gemma's factor on scores, which files do not have: 27B, known by its layers, differs."""
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return metadata.size("embedding_length") // metadata.size("attention.head_count") if is_27b else config["head_dim"]


def _cohere(metadata: Metadata, family: str) -> dict[str, object]:
    config = _of_family(metadata, family, eps="layer_norm_eps") | {"logit_scale": metadata.number("logit_scale")}
    is_second = family == "Cohere2ForCausalLM"
    return config | ({"sliding_window": metadata.size("attention.sliding_window")} if is_second else {})


def _stablelm(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a StableLM. Files may say of any that its sublayers are parallel: a missing norm tells."""
    config = _of_family(metadata, "StableLmForCausalLM", turns_part=True, eps="layer_norm_eps")
    return config | {"use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight")}


def _falcon(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Falcon; all of them as those of the new architecture, in which one KV head is a group."""
    config = _of_family(metadata, "FalconForCausalLM", eps="layer_norm_epsilon")
    return config | {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if metadata.has_tensor("blk.0.attn_norm_2.weight") else 1,
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
    }


def _gpt_neox(metadata: Metadata) -> dict[str, object]:
    config = _of_family(metadata, "GPTNeoXForCausalLM", turns_part=True, eps="layer_norm_eps")
    return config | {"use_parallel_residual": metadata.flag("use_parallel_residual", True)}


def _olmo(metadata: Metadata) -> dict[str, object]:
    metadata.reject(LAYER_NORM_EPS, 1e-5, why="OLMo 1 has that of its norms in its code")
    limit = metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None
    return _of_family(metadata, "OlmoForCausalLM", eps="layer_norm_eps") | {"clip_qkv": limit}


def _gpt_oss(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a gpt-oss. Files do not say that the bounds of its YaRN are no whole numbers."""
    config = _of_family(metadata, "GptOssForCausalLM")
    if isinstance(config["rope_scaling"], dict):
        config["rope_scaling"] |= {"truncate": False}
    return config | {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "sliding_window": metadata.size("attention.sliding_window"),
    }


def _rotary_decoder(
    metadata: Metadata, *, turns_part: bool = False, eps: str = "rms_norm_eps"
) -> dict[str, object]:
    """Return the keys that all families with rotary positions have.

    `turns_part`: heads may be rotated in part; `eps`: the family's key of the number that norms add to variances.
    """
    hidden_size, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    if not metadata.has("attention.key_length") and hidden_size % num_heads:
        raise metadata.file.error(f"embedding_length {hidden_size} does not divide among {num_heads} heads")
    head_dim = metadata.size("attention.key_length", hidden_size // num_heads or None, limit=MAX_HEAD_DIM)
    for key in ("attention.value_length",) if turns_part else ("attention.value_length", "rope.dimension_count"):
        metadata.reject(key, head_dim, why=f"it must be the head's {head_dim} dimensions")
    rotated = metadata.size("rope.dimension_count", head_dim, limit=head_dim)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count", limit=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length", limit=MAX_POSITIONS),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        **({"partial_rotary_factor": rotated / head_dim} if turns_part else {}),
        eps: metadata.number("attention.layer_norm_rms_epsilon" if eps.startswith("rms") else LAYER_NORM_EPS),
    }


def _rope_scaling(metadata: Metadata) -> dict[str, object] | None:
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn"}
    kind = metadata.choice("rope.scaling.type", kinds, "none" if not metadata.has("rope.scale_linear") else "linear")
    if kind == "default":
        return None
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if metadata.has("rope.scaling.original_context_length"):
            original = metadata.size("rope.scaling.original_context_length", limit=MAX_POSITIONS)
            scaling["original_max_position_embeddings"] = original
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.has(f"rope.scaling.{key}"):
                scaling[name] = metadata.number(f"rope.scaling.{key}")
        attention_factor = metadata.number("rope.scaling.attn_factor", 1.0)
        if attention_factor != 1.0:
            scaling["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def _gpt2(metadata: Metadata) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": metadata.size("embedding_length"),
        "n_inner": metadata.size("feed_forward_length"),
        "n_layer": metadata.size("block_count", limit=MAX_LAYERS),
        "n_head": metadata.size("attention.head_count"),
        "n_positions": metadata.rows("position_embd.weight"),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPS),
    }


ARCHITECTURES = {
    "llama": Architecture(
        _llama, _EXPERT_WEIGHTS, has_permuted_heads=True,
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "qwen2": Architecture(partial(_of_family, family="Qwen2ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen3": Architecture(partial(_of_family, family="Qwen3ForCausalLM"), _LLAMA_WEIGHTS),
    "granite": Architecture(
        _granite, _LLAMA_WEIGHTS, has_permuted_heads=True,
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "smollm3": Architecture(
        partial(_of_family, family="SmolLM3ForCausalLM"), _LLAMA_WEIGHTS, has_permuted_heads=True,
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "olmo": Architecture(_olmo, _LLAMA_WEIGHTS, has_permuted_heads=True, reads=("attention.clamp_kqv",)),
    "olmo2": Architecture(_olmo2, _OLMO2_WEIGHTS),
    "phi3": Architecture(_phi3, _PHI3_WEIGHTS),
    "glm4": Architecture(
        partial(_of_family, family="Glm4ForCausalLM", turns_part=True), _GLM4_WEIGHTS,
        flags={"attention_bias": QUERY_BIAS},
    ),
    "gemma": Architecture(partial(_of_family, family="GemmaForCausalLM"), _LLAMA_WEIGHTS, has_raised_norms=True),
    "gemma2": Architecture(
        _gemma2, _GEMMA2_WEIGHTS, reads=("attn_logit_softcapping", "final_logit_softcapping"), has_raised_norms=True,
    ),
    "gemma3": Architecture(_gemma3, _GEMMA2_WEIGHTS, has_raised_norms=True),
    "command-r": Architecture(
        partial(_cohere, family="CohereForCausalLM"), _LLAMA_WEIGHTS, reads=("logit_scale",),
        flags={"attention_bias": QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        partial(_cohere, family="Cohere2ForCausalLM"), _LLAMA_WEIGHTS, reads=("logit_scale",),
        flags={"attention_bias": QUERY_BIAS},
    ),
    "stablelm": Architecture(
        _stablelm, _LLAMA_WEIGHTS, flags={"use_qkv_bias": QUERY_BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
    ),
    "falcon": Architecture(_falcon, _FALCON_WEIGHTS, flags={"bias": "blk.0.attn_qkv.bias"}),
    "gptneox": Architecture(_gpt_neox, _PHI3_WEIGHTS, flags={"attention_bias": "blk.0.attn_qkv.bias"}),
    "gpt2": Architecture(_gpt2, _GPT2_WEIGHTS),
    "olmoe": Architecture(partial(_of_family, family="OlmoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen2moe": Architecture(partial(_of_family, family="Qwen2MoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen3moe": Architecture(partial(_of_family, family="Qwen3MoeForCausalLM"), _EXPERT_WEIGHTS),
    "gpt-oss": Architecture(_gpt_oss, _GPT_OSS_WEIGHTS, flags={"attention_bias": QUERY_BIAS}),
}
