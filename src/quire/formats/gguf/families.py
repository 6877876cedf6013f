"""Families of GGUF files, a function each: the keys of config.json, from the metadata of a file."""

import math
from collections.abc import Mapping, Sequence

from quire.formats.gguf.gguf_file import Metadata
from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS

LAYER_NORM_EPS = "attention.layer_norm_epsilon"
_EXPERT_KEYS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}  # fmt: skip


def of_family(
    metadata: Metadata, family: str, *, is_normalized: bool = True, turns_part: bool = False, eps: str = "rms_norm_eps"
) -> dict[str, object]:
    """Return the keys of a family with rotary positions; `is_normalized` is about the weights of experts."""
    config = rotary_decoder(metadata, turns_part=turns_part, eps=eps) | {"architectures": [family]}
    if not (metadata.has("expert_count") and metadata.size("expert_count", least=0)):
        return config
    sizes = {name: metadata.size(key) for key, name in _EXPERT_KEYS.items() if metadata.has(key)}
    return config | sizes | {"num_experts_per_tok": metadata.size("expert_used_count"), "norm_topk_prob": is_normalized}


GATING_SIGMOID = 2


def glm4_moe(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a GLM-4.5 to 4.7; the last blocks of a file may predict later tokens, and are left out."""
    config = _with_biased_experts(metadata, of_family(metadata, "Glm4MoeForCausalLM", turns_part=True))
    return config | {"use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}


def dots1(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a dots.llm1; files name no window."""
    return _with_biased_experts(metadata, of_family(metadata, "Dots1ForCausalLM")) | {"sliding_window": None}


def _with_biased_experts(metadata: Metadata, config: dict[str, object]) -> dict[str, object]:
    """Return the keys with those of a router as DeepSeek V3's, and without blocks behind the layers."""
    metadata.reject("expert_gating_func", 0, GATING_SIGMOID, why="the weights of its experts are sigmoids")
    num_groups = max(1, metadata.size("expert_group_count", 1, least=0))
    return config | _later_blocks(metadata) | _routed(metadata) | {
        "n_group": num_groups,
        "topk_group": metadata.size("expert_group_used_count", num_groups, limit=num_groups),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
    }


def _later_blocks(metadata: Metadata) -> dict[str, object]:
    """Return the number of layers, without blocks that predict later tokens."""
    num_later = metadata.size("nextn_predict_layers", 0, least=0)
    num_blocks = metadata.size("block_count", least=num_later + 1, limit=MAX_LAYERS)
    return {"num_hidden_layers": num_blocks - num_later}


def _routed(metadata: Metadata) -> dict[str, object]:
    """Return the keys of experts behind some dense layers, with a shared one."""
    return {
        "n_routed_experts": metadata.size("expert_count"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "first_k_dense_replace": metadata.size("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def deepseek2(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a model with attention over latents: DeepSeek V2 and V3, and GLM-4.7-Flash as V3.

    Newer files have the sizes of heads under names of their own, and one KV head. Of YaRN's factors files have
    mscale_all_dim alone, times 0.1: mscale equals it.
    """
    is_sigmoid = metadata.raw("expert_gating_func") == GATING_SIGMOID
    end = "_mla" if metadata.has("attention.key_length_mla") else ""
    lengths = (f"attention.key_length{end}", f"attention.value_length{end}")
    key_dim, value_dim = (metadata.size(key, limit=MAX_HEAD_DIM) for key in lengths)
    rope_dim = metadata.size("rope.dimension_count", limit=key_dim - 1)
    scaling = _rope_scaling(metadata)
    if scaling is not None and metadata.raw("rope.scaling.yarn_log_multiplier"):
        weight = 10 * metadata.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
        scaling.pop("attention_factor", None)
    config: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_attention_heads": metadata.size("attention.head_count"),
        "kv_lora_rank": metadata.size("attention.kv_lora_rank"),
        "q_lora_rank": metadata.size("attention.q_lora_rank") if metadata.has("attention.q_lora_rank") else None,
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        "max_position_embeddings": metadata.size("context_length", limit=MAX_POSITIONS),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": scaling,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }
    if is_sigmoid:
        return _with_biased_experts(metadata, config)
    metadata.reject("expert_gating_func", 0, 1, why="the weights of its experts are a softmax or sigmoids")
    metadata.reject("expert_weights_norm", False, why="the softmax over all experts is not normalized")
    num_groups = max(1, metadata.size("expert_group_count", 1, least=0))
    return config | _later_blocks(metadata) | {
        "topk_method": "greedy" if num_groups == 1 else "group_limited_greedy",
        "n_group": num_groups,
        "topk_group": metadata.size("expert_group_used_count", num_groups, limit=num_groups),
        **_routed(metadata),
    }


_KIMI_NAMES = {
    "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}  # fmt: skip


def kimi_linear(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Kimi Linear: layers of delta attention have 0 KV heads."""
    metadata.reject("expert_gating_func", GATING_SIGMOID, why="the weights of its experts are sigmoids")
    kv_heads, config = _by_layer(metadata, "attention.head_count_kv"), deepseek2(metadata)
    return {_KIMI_NAMES.get(key, key): value for key, value in config.items()} | {
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "linear_head_dim": metadata.size("kda.head_dim", limit=MAX_HEAD_DIM),
        "linear_num_heads": config["num_attention_heads"],
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }


def minimax_m2(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a MiniMax-M2."""
    metadata.reject("expert_gating_func", 0, GATING_SIGMOID, why="the weights of its experts are sigmoids")
    return of_family(metadata, "MiniMaxM2ForCausalLM", turns_part=True) | {
        "num_local_experts": metadata.size("expert_count"),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
    }


def lfm2(metadata: Metadata, family: str = "Lfm2ForCausalLM") -> dict[str, object]:
    """Return the keys of an LFM2: layers with a convolution have 0 KV heads, and files hold the feed-forward's size."""
    kv_heads = _by_layer(metadata, "attention.head_count_kv")
    return rotary_decoder(metadata, num_kv_heads=max(kv_heads)) | {
        "architectures": [family],
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.size("shortconv.l_cache"),
    }


def _by_layer(metadata: Metadata, key: str) -> list[int]:
    """Return a number for each block: 0, or one that is the same in all others."""
    counts = metadata.counts(key, metadata.size("block_count", limit=MAX_LAYERS))
    if len(set(counts) - {0}) > 1:
        raise metadata.error(f"{key} must be 0 or one other number, got {sorted(set(counts))}")
    return list(counts)


def granite_hybrid(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Granite 4 H, or of a Bamba, which has rotary positions; a Mamba-2 has 0 KV heads."""
    kv_heads, is_bamba = _by_layer(metadata, "attention.head_count_kv"), metadata.flag("rope.scaling.finetuned", True)
    config = rotary_decoder(metadata, turns_part=is_bamba, num_kv_heads=max(kv_heads))
    hidden_size, inner = metadata.size("embedding_length"), metadata.size("ssm.inner_size")
    if inner % hidden_size:
        raise metadata.error(f"ssm.inner_size must be a multiple of embedding_length {hidden_size}, got {inner}")
    first = next((index for index, count in enumerate(kv_heads) if count), 0)
    config |= _mamba(metadata, kv_heads) | {
        "mamba_expand": inner // hidden_size, "attention_bias": metadata.has_tensor(f"blk.{first}.attn_q.bias")
    }
    if is_bamba:
        for key in GRANITE_FACTORS:
            metadata.reject(key, 0, 1, why="a Bamba has no such factor")
        attending = [index for index, count in enumerate(kv_heads) if count]
        return config | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": attending}
    num_experts = metadata.size("expert_count", 0, least=0)
    dense = None if num_experts else int(str(config["intermediate_size"]))
    return config | _granite_factors(metadata, config) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "nope",
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.size("expert_used_count") if num_experts else None,
        "shared_intermediate_size": metadata.size("expert_shared_feed_forward_length", dense),
    }


def falcon_h1(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Falcon-H1: its factors are in the weights of a file, and gates come before a norm."""
    return rotary_decoder(metadata) | _mamba(metadata, [0]) | {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": metadata.size("ssm.inner_size"),
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Nemotron-H or Nemotron 3 Nano: blocks of Mamba-2 have neither KV heads nor feed-forwards."""
    metadata.reject("moe_latent_size", 0, why="experts between two projections of all are not computed")
    metadata.reject("expert_gating_func", 0, GATING_SIGMOID, why="the weights of its experts are sigmoids")
    kv_heads, sizes = (_by_layer(metadata, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    num_layers = int(str(_later_blocks(metadata)["num_hidden_layers"]))
    num_experts = metadata.size("expert_count", 0, least=0)
    kinds = [
        "full_attention" if count else ("moe" if num_experts else "mlp") if size else "linear_attention"
        for count, size in zip(kv_heads, sizes, strict=True)
    ][:num_layers]
    is_mamba = [0 if kind == "linear_attention" else 1 for kind in kinds]
    mamba = _mamba(metadata, is_mamba)
    eps = "attention.layer_norm_rms_epsilon" if metadata.has("attention.layer_norm_rms_epsilon") else LAYER_NORM_EPS
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": metadata.size("embedding_length"),
        "layers_block_type": kinds,
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": max(*kv_heads, 1),
        "head_dim": metadata.size("attention.key_length", limit=MAX_HEAD_DIM),
        "intermediate_size": max(*sizes, 1),
        "max_position_embeddings": metadata.size("context_length", limit=MAX_POSITIONS),
        "layer_norm_epsilon": metadata.number(eps),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }
    if not num_experts:
        return config
    num_groups = max(1, metadata.size("expert_group_count", 1, least=0))
    return config | {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "n_shared_experts": metadata.size("expert_shared_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "n_group": num_groups,
        "topk_group": metadata.size("expert_group_used_count", num_groups, limit=num_groups),
    }


def _mamba(metadata: Metadata, kept: Sequence[int]) -> dict[str, object]:
    """Return the sizes of layers of Mamba-2, by Bamba's names. `kept`: for each block, 0 if it is one."""
    num_heads, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    if inner % num_heads:
        raise metadata.error(f"ssm.inner_size = {inner} does not divide among {num_heads} heads")
    first = next((index for index, count in enumerate(kept) if not count), 0)
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_n_groups": metadata.size("ssm.group_count"),
        "mamba_d_state": metadata.size("ssm.state_size", limit=MAX_HEAD_DIM),
        "mamba_d_conv": metadata.size("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
    }


def lfm2_moe(metadata: Metadata) -> dict[str, object]:
    """Return the keys of an LFM2 with experts."""
    metadata.reject("expert_gating_func", 0, GATING_SIGMOID, why="the weights of its experts are sigmoids")
    config = lfm2(metadata, "Lfm2MoeForCausalLM")
    return config | {
        "use_expert_bias": metadata.has_tensor(f"blk.{metadata.size('block_count') - 1}.exp_probs_b.bias"),
        "num_dense_layers": metadata.size("leading_dense_block_count", 0, least=0),
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def qwen_hybrid(metadata: Metadata, family: str) -> dict[str, object]:
    """Return the keys of a Qwen3-Next, or of a Qwen3.5 or Qwen3.6: gated delta nets, and attention in some layers."""
    num_values, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    if inner % num_values:
        raise metadata.error(f"ssm.inner_size = {inner} does not divide among {num_values} heads")
    num_blocks, every = metadata.size("block_count", limit=MAX_LAYERS), metadata.size("full_attention_interval", 4)
    is_recurrent = metadata.windowed("attention.recurrent_layers", num_blocks, every)
    later = _later_blocks(metadata)
    config = of_family(metadata, family, turns_part=True) | later
    types = ["linear_attention" if each else "full_attention" for each in is_recurrent]
    return config | {
        "layer_types": types[: int(str(later["num_hidden_layers"]))],
        "linear_num_key_heads": metadata.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": metadata.size("ssm.state_size", limit=MAX_HEAD_DIM),
        "linear_value_head_dim": inner // num_values,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }


def ernie4_5_moe(metadata: Metadata) -> dict[str, object]:
    """Return the keys of an ERNIE 4.5 with experts."""
    metadata.reject("expert_gating_func", 0, 1, why="the weights of its experts are a softmax")
    return of_family(metadata, "Ernie4_5_MoeForCausalLM") | {
        "moe_num_experts": metadata.size("expert_count"),
        "moe_k": metadata.size("expert_used_count"),
        "moe_num_shared_experts": metadata.size("expert_shared_count", 0, least=0),
        "moe_layer_start_index": metadata.size("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
    }


def rotary_decoder(
    metadata: Metadata, *, turns_part: bool = False, eps: str = "rms_norm_eps", num_kv_heads: int | None = None
) -> dict[str, object]:
    """Return the keys that all families with rotary positions have.

    `turns_part`: heads may be rotated in part; `eps`: the family's key of the number that norms add to variances;
    `num_kv_heads`: of files that list them by layer.
    """
    hidden_size, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    if not metadata.has("attention.key_length") and hidden_size % num_heads:
        raise metadata.file.error(f"embedding_length {hidden_size} does not divide among {num_heads} heads")
    head_dim = metadata.size("attention.key_length", hidden_size // num_heads or None, limit=MAX_HEAD_DIM)
    for key in ("attention.value_length",) if turns_part else ("attention.value_length", "rope.dimension_count"):
        metadata.reject(key, head_dim, why=f"it must be the head's {head_dim} dimensions")
    rotated = metadata.size("rope.dimension_count", head_dim, limit=head_dim)
    key = "expert_feed_forward_length"
    only_experts = metadata.size(key) if metadata.has(key) else None
    return {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length", only_experts),
        "num_hidden_layers": metadata.size("block_count", limit=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or metadata.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length", limit=MAX_POSITIONS),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        **({"partial_rotary_factor": rotated / head_dim} if turns_part else {}),
        eps: metadata.number("attention.layer_norm_rms_epsilon" if eps.startswith("rms") else LAYER_NORM_EPS),
    }


def _rope_scaling(metadata: Metadata) -> dict[str, object] | None:
    """Return the scaling. YaRN's factor on cosines and sines is in the file as such, or what multiplies the usual."""
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn"}
    kind = metadata.choice("rope.scaling.type", kinds, "none" if not metadata.has("rope.scale_linear") else "linear")
    if kind != "yarn":
        metadata.reject("rope.scaling.yarn_attn_factor", 1, why="the scaling is not YaRN")
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
        whole, more = (metadata.number(f"rope.scaling.{key}", 1.0) for key in ("yarn_attn_factor", "attn_factor"))
        if (whole, more) != (1.0, 1.0):
            scaling["attention_factor"] = more * (0.1 * math.log(max(factor, 1.0)) + 1.0 if whole == 1.0 else whole)
    return scaling


GRANITE_FACTORS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GEMMA4_FULL_EVERY = 6  # layers, where the file does not say
ROPE_FREQS = "rope_freqs.weight"
STILL = 1e29           # the least divisor of a frequency of 0
OLMO3_FULL_EVERY = 4  # layers, where the file does not say
WINDOW_PATTERN = "attention.sliding_window_pattern"
ROPE_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


def llama(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Llama, a Mistral or a Mixtral."""
    config = of_family(metadata, "MixtralForCausalLM")
    if "num_experts" in config:
        return config
    config["architectures"] = ["LlamaForCausalLM"]
    if metadata.has("attention.sliding_window"):
        window = metadata.size("attention.sliding_window", least=0)
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window or None}
    return config


def granite(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Granite."""
    config = llama(metadata) | {"architectures": ["GraniteForCausalLM"]}
    return config | _granite_factors(metadata, config)


def _granite_factors(metadata: Metadata, config: Mapping[str, object]) -> dict[str, object]:
    default = {"attention.scale": int(str(config["head_dim"])) ** -0.5}
    return {name: metadata.number(key, default.get(key, 1.0)) for key, name in GRANITE_FACTORS.items()}


def olmo2(metadata: Metadata) -> dict[str, object]:
    """Return the keys of an OLMo 2, or of an OLMo 3 if there are windows; layers that have one have no scaling."""
    config = rotary_decoder(metadata) | {"architectures": ["Olmo2ForCausalLM"]}
    window = metadata.size("attention.sliding_window", 0, least=0)
    if window == 0:
        return config
    windowed = metadata.windowed(WINDOW_PATTERN, metadata.size("block_count", limit=MAX_LAYERS), OLMO3_FULL_EVERY)
    theta = metadata.number("rope.freq_base", 10_000.0)
    of_windowed = {"rope_theta": metadata.number("rope.freq_base_swa", theta)}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "rope_scaling": None,
        "rope_parameters": {"full_attention": _rope(config), "sliding_attention": of_windowed},
    }


def mistral3(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Ministral 3 or the text model in a Mistral Small 3.1."""
    metadata.reject("attention.sliding_window", 0, why="no layer has a window")
    config = of_family(metadata, "Ministral3ForCausalLM")
    rope = _rope(config)
    if metadata.raw("rope.scaling.yarn_log_multiplier"):  # 0: none
        rope |= {"mscale": 1.0, "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier")}
    if metadata.raw("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
    return config | {"rope_scaling": None, "rope_parameters": rope}


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of rotary embeddings in one section, as newer configs have them."""
    scaling = config["rope_scaling"]
    return {"rope_theta": config["rope_theta"], **(scaling if isinstance(scaling, dict) else {})}


def phi3(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Phi-3 or Phi-4; its longrope is in the file as tensors."""
    window = metadata.size("attention.sliding_window", 0, least=0) or None
    config = rotary_decoder(metadata, turns_part=True)
    config |= {"architectures": ["Phi3ForCausalLM"], "sliding_window": window}
    if not any(metadata.has_tensor(name) for name in ROPE_FACTORS):
        return config
    num_pairs = metadata.size("rope.dimension_count", int(str(config["head_dim"]))) // 2
    short, long = (list(metadata.divisors(name, num_pairs)) for name in ROPE_FACTORS)
    config["original_max_position_embeddings"] = metadata.size(
        "rope.scaling.original_context_length", limit=MAX_POSITIONS
    )
    scaling: dict[str, object] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if metadata.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return config | {"rope_scaling": scaling}


def gemma2(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Gemma 2."""
    config = rotary_decoder(metadata)
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": _score_scalar(metadata, config, GEMMA2_27B_LAYERS),
    }


def gemma3(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Gemma 3. Files name neither the factor on scores nor, older ones, windowed layers' base."""
    metadata.reject(WINDOW_PATTERN, 6, why="every sixth layer of Gemma 3 has no window")
    config = rotary_decoder(metadata) | {"architectures": ["Gemma3ForCausalLM"]}
    return config | {
        "sliding_window": metadata.size("attention.sliding_window"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _score_scalar(metadata, config, GEMMA3_27B_LAYERS),
    }


def gemma4(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Gemma 4. Values are keys in files without a projection of values of layers without windows.

    Of the rotary scaling of these layers files have the divisors: 1 for pairs that turn, 1e30 for others.
    """
    num_layers, head_dims = metadata.size("block_count", limit=MAX_LAYERS), list[int]()
    windowed = metadata.windowed(WINDOW_PATTERN, num_layers, GEMMA4_FULL_EVERY)
    for end in ("", "_swa"):
        head_dims.append(metadata.size(f"attention.key_length{end}", *head_dims[:1], limit=MAX_HEAD_DIM))
        for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            metadata.reject(key, head_dims[-1], why=f"it must be the head's {head_dims[-1]} dimensions")
    metadata.reject("rope.scaling.type", "none", why="no family here computes with it")
    num_shared = metadata.size("attention.shared_kv_layers", 0, least=0, limit=num_layers - 1)
    kv_heads, sizes = (
        metadata.counts_or_size(key, num_layers) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    is_wide = num_shared > 0 and sizes[-1] == 2 * sizes[0]
    if sizes != [sizes[0] * (1 + (is_wide and index >= num_layers - num_shared)) for index in range(num_layers)]:
        limit = f"one number, or twice that in the last {num_shared} layers"
        raise metadata.error(f"feed_forward_length must be {limit}, got {sorted(set(sizes))}")
    full_values = (f"blk.{index}.attn_v.weight" for index in range(num_layers - num_shared) if not windowed[index])
    num_pairs = head_dims[0] // 2
    divisors = metadata.divisors(ROPE_FREQS, num_pairs)
    num_turning = sum(each == 1 for each in divisors)
    if any(each != 1 for each in divisors[:num_turning]) or any(each < STILL for each in divisors[num_turning:]):
        raise metadata.file.error(f"tensor {ROPE_FREQS} must be 1 for the first pairs, and at least {STILL} for others")
    softcap = "final_logit_softcapping"
    config: dict[str, object] = {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": sizes[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": metadata.size("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "head_dim": head_dims[1],
        "max_position_embeddings": metadata.size("context_length", limit=MAX_POSITIONS),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": metadata.size("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "attention_k_eq_v": any(not metadata.has_tensor(name) for name in full_values),
        "hidden_size_per_layer_input": metadata.size("embedding_length_per_layer_input", 0, least=0),
        "final_logit_softcapping": metadata.number(softcap) if metadata.has(softcap) else None,
        "per_layer_config": {
            str(index): {"head_dim": head_dims[each], "num_key_value_heads": kv_heads[index]}
            for index, each in enumerate(windowed)
        },
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": min((num_turning + 0.5) / num_pairs, 1.0),  # rounded down to pairs
            },
            "sliding_attention": {"rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)},
        },
    }
    if not metadata.has_tensor("blk.0.ffn_gate_inp.weight"):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": metadata.size("expert_count"),
        "top_k_experts": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
    }


def _score_scalar(metadata: Metadata, config: Mapping[str, object], layers_of_27b: int) -> object:
    """Return a Gemma's factor on scores, which files do not have: 27B, known by its layers, differs."""
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return metadata.size("embedding_length") // metadata.size("attention.head_count") if is_27b else config["head_dim"]


def cohere(metadata: Metadata, family: str) -> dict[str, object]:
    """Return the keys of a Command R; of the second kind (`Cohere2ForCausalLM`) with windows."""
    config = of_family(metadata, family, eps="layer_norm_eps") | {"logit_scale": metadata.number("logit_scale")}
    is_second = family == "Cohere2ForCausalLM"
    return config | ({"sliding_window": metadata.size("attention.sliding_window")} if is_second else {})


def stablelm(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a StableLM. Files may say of any that its sublayers are parallel: a missing norm tells."""
    config = of_family(metadata, "StableLmForCausalLM", turns_part=True, eps="layer_norm_eps")
    return config | {"use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight")}


def falcon(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a Falcon; all of them as those of the new architecture, in which one KV head is a group."""
    config = of_family(metadata, "FalconForCausalLM", eps="layer_norm_epsilon")
    return config | {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if metadata.has_tensor("blk.0.attn_norm_2.weight") else 1,
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
    }


def gpt_neox(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a GPT-NeoX."""
    config = of_family(metadata, "GPTNeoXForCausalLM", turns_part=True, eps="layer_norm_eps")
    return config | {"use_parallel_residual": metadata.flag("use_parallel_residual", True)}


def olmo(metadata: Metadata) -> dict[str, object]:
    """Return the keys of an OLMo 1."""
    metadata.reject(LAYER_NORM_EPS, 1e-5, why="OLMo 1 has that of its norms in its code")
    limit = metadata.number("attention.clamp_kqv") if metadata.has("attention.clamp_kqv") else None
    return of_family(metadata, "OlmoForCausalLM", eps="layer_norm_eps") | {"clip_qkv": limit}


def gpt_oss(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a gpt-oss. Files do not say that the bounds of its YaRN are no whole numbers."""
    config = of_family(metadata, "GptOssForCausalLM")
    if isinstance(config["rope_scaling"], dict):
        config["rope_scaling"] |= {"truncate": False}
    return config | {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "sliding_window": metadata.size("attention.sliding_window"),
    }


def gpt2(metadata: Metadata) -> dict[str, object]:
    """Return the keys of a GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": metadata.size("embedding_length"),
        "n_inner": metadata.size("feed_forward_length"),
        "n_layer": metadata.size("block_count", limit=MAX_LAYERS),
        "n_head": metadata.size("attention.head_count"),
        "n_positions": metadata.rows("position_embd.weight"),
        "layer_norm_epsilon": metadata.number(LAYER_NORM_EPS),
    }
