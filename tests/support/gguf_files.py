"""GGUF files for tests: a writer of the container, and model folders rewritten as llama.cpp's converter does it."""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.formats.gguf.gguf_file import GGML_TYPES
from quire.formats.gguf.gguf_source import read_gguf
from quire.kernels.torch_arrays import to_tensor
from quire.model.quantization import QuantizationOptions
from quire.text.tokenizer import Tokenizer

TYPE_IDS = {kind.name: type_id for type_id, kind in GGML_TYPES.items()}
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_CODES = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}
ALIGNMENT = 32

Stored = tuple[str, tuple[int, ...], bytes]  # type, shape with rows first, bytes
Quantize = Callable[[str, Tensor], Stored]


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    """Write a file. Integers are written as uint32, floats as float32, lists of strings, floats and int32 as arrays."""
    header = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data, size = [], 0
    for name, (kind, shape, stored) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += _string(name) + dims + struct.pack("<IQ", TYPE_IDS.get(kind, 99), size)
        data.append(stored + bytes(-len(stored) % ALIGNMENT))
        size += len(data[-1])
    path.write_bytes(b"".join((header, bytes(-len(header) % ALIGNMENT), *data)))
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:  # noqa: ANN401 (of JSON's kinds)
    if isinstance(value, list):
        items = b"".join(_value(item)[4:] for item in value)
        kind = _kind(value[0]) if value else STRING
        return struct.pack("<IIQ", ARRAY, I32 if kind == U32 else kind, len(value)) + items
    kind = _kind(value)
    if kind == STRING:
        return struct.pack("<I", kind) + _string(value)
    return struct.pack(f"<I{_CODES[kind]}", kind, value % 2**32 if kind == U32 else value)


def _kind(value: object) -> int:
    return {bool: BOOL, int: U32, float: F32, str: STRING}[type(value)]


def as_is(name: str, tensor: Tensor) -> Stored:
    """Store vectors and norms as float32, and matrices in the dtype that they have, as the converter does it."""
    tensor = tensor.float() if tensor.dim() == 1 or name.endswith("_norm.weight") else tensor
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
    return kind, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def convert(folder: Path, path: Path, quantize: Quantize = as_is, **changes: Any) -> Path:  # noqa: ANN401
    """Write a folder in Hugging Face format as a GGUF file; `changes` are of the metadata, None leaves a key out."""
    return write_gguf(path, *converted(folder, quantize, **changes))


def converted(
    folder: Path, quantize: Quantize = as_is, **changes: Any  # noqa: ANN401
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the metadata and the tensors that `convert` writes."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["architectures"][0], "llama")
    architecture += "_moe" if architecture == "nemotron_h" and "n_routed_experts" in config else ""
    make = _gpt2_metadata if architecture == "gpt2" else _llama_metadata
    metadata = {"general.architecture": architecture, "general.alignment": ALIGNMENT}
    metadata |= {f"{architecture}.{key}": value for key, value in make(config).items()}
    metadata |= tokenizer_metadata(folder, changes.pop("pre", "gpt-2")) if has_tokenizer(folder) else {}
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    tensors, single = {}, {}
    loaded = load_file(folder / "model.safetensors")
    has_head = metadata.get(f"{architecture}.nextn_predict_layers")
    loaded = _with_stacked_norms(_with_heads(loaded, config) if has_head else _without_heads(loaded))
    loaded = _with_stacked_gates(_with_plain_mlps(_with_plain_groups(loaded, config), config))
    if f"{architecture}.attention.key_length_mla" in metadata:
        loaded = _with_split_latents(loaded, config)
    for name, tensor in loaded.items():
        renamed, moved = _stored(name, tensor, config, architecture)
        kind, _, content = quantize(renamed, moved.flatten(0, moved.dim() - 2) if moved.dim() > 2 else moved)
        single[renamed] = kind, tuple(moved.shape), content
    for name, (kind, shape, content) in single.items():
        place = re.fullmatch(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.(weight|bias)", name)
        if place is None:
            is_vector = name.endswith(".ffn_gate_inp_shexp.weight")
            tensors[name] = kind, shape[1:] if is_vector else shape, content
        elif place[2] == "0":
            count = sum(1 for other in single if re.fullmatch(rf"{place[1]}\.\d+\.{place[3]}", other))
            all_bytes = b"".join(single[f"{place[1]}.{expert}.{place[3]}"][2] for expert in range(count))
            tensors[f"{place[1]}_exps.{place[3]}"] = kind, (count, *shape), all_bytes
    if architecture == "gemma4":
        part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        num_pairs = config["global_head_dim"] // 2
        turning = torch.arange(num_pairs) < part * num_pairs
        tensors["rope_freqs.weight"] = as_is("", torch.where(turning, 1.0, 1e30))
    factors = config.get("rope_scaling") or {}
    for kind in ("long", "short"):
        if f"{kind}_factor" in factors:
            tensors[f"rope_factors_{kind}.weight"] = as_is("", torch.tensor(factors[f"{kind}_factor"]))
    return metadata, tensors


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer.json."""
    return (folder / "tokenizer.json").exists()


def tokenizer_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer.json and tokenizer_config.json."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = content["model"], {token["id"]: token for token in content["added_tokens"]}
    vocabulary = {index: token for token, index in model["vocab"].items()}
    vocabulary |= {index: token["content"] for index, token in added.items()}
    tokens = [vocabulary.get(index, f"[PAD{index}]") for index in range(max(vocabulary) + 1)]
    of_added = {index: 3 if token["special"] else 4 for index, token in added.items()}
    kinds = [of_added.get(index, 1 if index in vocabulary else 5) for index in range(len(tokens))]
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    is_sentencepiece = model.get("byte_fallback", False)
    tokenizer = Tokenizer.from_folder(folder)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if is_sentencepiece else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False),
    }
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if is_sentencepiece:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
        metadata["tokenizer.ggml.scores"] = [ranks.get(token, -1e6) for token in tokens]
    else:
        metadata |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        text = settings.get(name)
        if text is not None:
            text = text["content"] if isinstance(text, dict) else text
            metadata[f"tokenizer.ggml.{key}_token_id"] = tokens.index(text)
    if "chat_template" in settings:
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    return metadata


def _llama_metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    windowed = (config.get("rope_parameters") or {}).get("sliding_attention")
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        **({"rope.freq_base_swa": float(windowed["rope_theta"])} if windowed else {}),
    } | {key: config[name] for key, name in EXPERT_KEYS if name in config} | {
        f"attention.layer_norm_{'rms_' if name.startswith('rms') else ''}epsilon": config[name]
        for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if name in config
    } | _of_some(config) | _of_convolutions(config) | _of_delta_nets(config) | _of_mambas(config) | (
        _of_gemma4(config)
    )  # fmt: skip


def _of_convolutions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an LFM2: layers with a convolution have no KV heads."""
    if "conv_L_cache" not in config:
        return {}
    heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _of_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Gemma 4: sizes of heads and of feed-forwards by layer."""
    if "global_head_dim" not in config:
        return {}
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    full, windowed = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    heads, size = config["num_key_value_heads"], config["intermediate_size"]
    full_heads, num_shared = config.get("num_global_key_value_heads"), config.get("num_kv_shared_layers", 0)
    found: dict[str, Any] = {
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(windowed["rope_theta"]),
        **({"final_logit_softcapping": softcap} if (softcap := config.get("final_logit_softcapping")) else {}),
        **({"expert_used_count": used} if (used := config.get("top_k_experts")) else {}),
    }
    for end, key in (("", "global_head_dim"), ("_swa", "head_dim")):
        sizes = (f"attention.key_length{end}", f"attention.value_length{end}", f"rope.dimension_count{end}")
        found |= dict.fromkeys(sizes, config[key])
    if full_heads is not None:
        found["attention.head_count_kv"] = [full_heads if full else heads for full in is_full]
    if config.get("use_double_wide_mlp"):
        first = len(is_full) - num_shared
        found["feed_forward_length"] = [size * (1 + (index >= first)) for index in range(len(is_full))]
    return found


def _with_stacked_gates(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the gate and the up projection of each expert of a Gemma 4 as one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if re.search(r"\d\.experts\.\d+\.gate_proj", name):
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif not re.search(r"\d\.experts\.\d+\.up_proj", name):
            found[name] = tensor
    return found


def _of_delta_nets(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Qwen3-Next or Qwen3.5."""
    if "linear_num_key_heads" not in config:
        return {}
    num_values = config["linear_num_value_heads"]
    head_dim, part = config["head_dim"], config["rope_parameters"]["partial_rotary_factor"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "rope.dimension_count": int(head_dim * part),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }


def _of_mambas(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Granite 4 H, a Bamba, a Falcon-H1 or a Nemotron-H."""
    family, layers = config["architectures"][0], range(config["num_hidden_layers"])
    if family not in MAMBAS:
        return {}
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    if family != "NemotronHForCausalLM":
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    heads, head_dim, groups, state, taps = (config[name] for name in names)
    found: dict[str, Any] = {
        "ssm.time_step_rank": heads, "ssm.inner_size": heads * head_dim, "ssm.group_count": groups,
        "ssm.state_size": state, "ssm.conv_kernel": taps,
    }
    kv_heads = config["num_key_value_heads"]
    if family == "NemotronHForCausalLM":
        pattern, size = config["hybrid_override_pattern"], config.get("moe_intermediate_size")
        found["attention.head_count_kv"] = [kv_heads if kind == "*" else 0 for kind in pattern]
        size = size or config["intermediate_size"]
        found["feed_forward_length"] = [size if kind in "-E" else 0 for kind in pattern]
        if "n_routed_experts" in config:
            found["expert_shared_feed_forward_length"] = config["moe_shared_expert_intermediate_size"]
            found["expert_shared_count"] = 1
    elif family != "FalconH1ForCausalLM":
        is_bamba = family == "BambaForCausalLM"
        attending = config["attn_layer_indices"] if is_bamba else [
            index for index in layers if config["layer_types"][index] == "attention"
        ]
        found["attention.head_count_kv"] = [kv_heads if index in attending else 0 for index in layers]
        found["rope.scaling.finetuned"] = is_bamba
        if is_bamba:
            found["rope.dimension_count"] = config["hidden_size"] // config["num_attention_heads"] // 2
        else:
            found["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
            scales = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
            scales |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
            found |= {key: float(config[name]) for key, name in scales.items()}
    return found


def _of_some(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of windows, multipliers of logits, YaRN and longrope."""
    keys = {"attention.sliding_window": "sliding_window", "logit_scale": "logit_scale"}
    found = {key: config[name] for key, name in keys.items() if name in config}
    if "sliding_attention" in config.get("layer_types", ()):
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["attention.sliding_window_pattern"] = windowed
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = rope.get("full_attention", rope)
    if "llama_4_scaling_beta" in scaling:
        found["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
    scaling = {"original_max_position_embeddings": config.get("original_max_position_embeddings")} | scaling
    keys = {"original_context_length": "original_max_position_embeddings"}
    if scaling.get("rope_type") == "yarn":
        keys |= {"type": "rope_type", "factor": "factor", "yarn_attn_factor": "attention_factor",
                 "yarn_log_multiplier": "mscale_all_dim"}  # fmt: skip
    return found | {f"rope.scaling.{key}": scaling[name] for key, name in keys.items() if scaling.get(name)}


def _gpt2_metadata(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "block_count": config["n_layer"],
        "feed_forward_length": config.get("n_inner") or 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    }


ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite", "Olmo2ForCausalLM": "olmo2", "Gemma2ForCausalLM": "gemma2",
    "GemmaForCausalLM": "gemma", "Gemma3ForCausalLM": "gemma3", "Glm4ForCausalLM": "glm4",
    "Gemma4ForCausalLM": "gemma4",
    "CohereForCausalLM": "command-r", "Cohere2ForCausalLM": "cohere2", "StableLmForCausalLM": "stablelm",
    "FalconForCausalLM": "falcon", "GPTNeoXForCausalLM": "gptneox", "OlmoForCausalLM": "olmo",
    "SmolLM3ForCausalLM": "smollm3", "GptOssForCausalLM": "gpt-oss", "Olmo3ForCausalLM": "olmo2",
    "Ministral3ForCausalLM": "mistral3", "Glm4MoeForCausalLM": "glm4moe", "Dots1ForCausalLM": "dots1",
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek2",
    "MiniMaxM2ForCausalLM": "minimax-m2", "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe", "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe",
    "GraniteMoeHybridForCausalLM": "granitehybrid", "BambaForCausalLM": "granitehybrid",
    "FalconH1ForCausalLM": "falcon-h1", "NemotronHForCausalLM": "nemotron_h",
    "Qwen2VLForConditionalGeneration": "qwen2vl", "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3VLForConditionalGeneration": "qwen3vl", "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3_5ForConditionalGeneration": "qwen35", "Mistral3ForConditionalGeneration": "mistral3",
    "KimiLinearForCausalLM": "kimi-linear",
}  # fmt: skip
MAMBAS = "GraniteMoeHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM"
PERMUTED = ("llama", "mistral3", "granite", "olmo", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")
EXPERT_KEYS = (
    ("expert_count", "num_experts"), ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"), ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_count", "n_routed_experts"), ("expert_count", "moe_num_experts"), ("expert_used_count", "moe_k"),
    ("expert_shared_count", "n_shared_experts"), ("expert_shared_count", "moe_num_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"), ("leading_dense_block_count", "moe_layer_start_index"),
    ("leading_dense_block_count", "num_dense_layers"),
    ("expert_weights_scale", "routed_scaling_factor"), ("expert_weights_norm", "norm_topk_prob"),
    ("interleave_moe_layer_step", "moe_layer_interval"), ("expert_gating_func", "gating_func"),
    ("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group"),
    ("expert_used_count", "num_experts_per_token"), ("expert_shared_count", "num_shared_experts"),
    ("expert_weights_norm", "moe_renormalize"), ("expert_group_count", "num_expert_group"),
)  # fmt: skip
_VECTORS = {
    ".self_attn.sinks": "attn_sinks.weight", ".e_score_correction_bias": "exp_probs_b.bias",
    ".feed_forward.expert_bias": "exp_probs_b.bias",
    ".layer_scalar": "layer_output_scale.weight", ".router.scale.weight": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".linear_attn.A_log": "ssm_a", ".linear_attn.dt_bias": "ssm_dt.bias", ".A_log": "ssm_a", ".dt_bias": "ssm_dt.bias",
    ".D": "ssm_d",
}  # fmt: skip
_EXPERT = re.compile(
    r"(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?experts\.(?P<expert>\d+)\.(?P<module>\w+)"
)
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "w1": "ffn_gate", "w3": "ffn_up",
    "w2": "ffn_down", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "gate_up_proj": "ffn_gate_up",
}  # fmt: skip
_OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_GEMMA4_NAMES = _OUTPUT_NORMS | {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
_LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
_HYBRID_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_MAMBA_NAMES = {
    f"{prefix}.{name}": own for prefix in ("mamba", "mixer") for name, own in (
        ("in_proj", "ssm_in"), ("conv1d", "ssm_conv1d"), ("norm", "ssm_norm"), ("out_proj", "ssm_out"),
    )
} | {
    "pre_ff_layernorm": "ffn_norm", "model.final_layernorm": "output_norm", "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down", "block_sparse_moe.router.layer":
    "ffn_gate_inp", "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "norm": "attn_norm",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    **{f"{kind}.{name}_proj": f"ffn_{name}{end}" for kind, end in (("plain_mlp", ""), ("shared_mlp", "_shexp"))
       for name in ("gate", "up", "down")},
}  # fmt: skip
_KIMI_NAMES = {f"self_attn.{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")} | {
    "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"block_sparse_moe.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}  # fmt: skip
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_OWN_NAMES = dict.fromkeys(HYBRIDS, _HYBRID_NAMES) | {
    "lfm2": _LFM2_NAMES, "lfm2moe": _LFM2_NAMES,
    **dict.fromkeys(("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"), _MAMBA_NAMES),
    "olmo2": _OUTPUT_NORMS, "gemma2": _OUTPUT_NORMS, "gemma3": _OUTPUT_NORMS,
    "gemma4": _GEMMA4_NAMES,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
    | {"mlp.gate_up_proj": "ffn_up"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "kimi-linear": _KIMI_NAMES,
}  # fmt: skip
NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "transformer.word_embeddings": "token_embd", "self_attention.query_key_value": "attn_qkv", "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2", "self_attention.dense": "attn_output",
    "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
    "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def _without_heads(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without those of heads that predict later tokens, which files here leave out."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}


def _with_heads(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors with the MTP head of a Qwen3.5 by DeepSeek V3's names, as the layer behind the last one."""
    later = f"model.layers.{config['num_hidden_layers']}."
    renamed = {"mtp.layers.0.": later, "mtp.fc.": f"{later}eh_proj.", "mtp.pre_fc_norm_embedding.": f"{later}enorm.",
               "mtp.pre_fc_norm_hidden.": f"{later}hnorm.", "mtp.norm.": f"{later}shared_head.norm."}  # fmt: skip
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        old = next((old for old in renamed if name.startswith(old)), "")
        found[renamed.get(old, "") + name.removeprefix(old)] = tensor
    return found


def _with_stacked_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the norms of StableLM's heads as one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, is_head, _ = name.partition(".norms.")
        if is_head:
            count = sum(1 for other in tensors if other.startswith(f"{module}.norms."))
            tensor = torch.stack([tensors[f"{module}.norms.{head}.weight"] for head in range(count)])  # noqa: PLW2901
        found[f"{module}.weight" if is_head else name] = tensor
    return found


def _with_split_latents(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors with the layers behind latents by head, those of keys transposed, as newer files have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        heads = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
        found[name.replace("kv_b_proj", "v_b_proj")] = values
    return found


def latent_metadata(config: dict[str, Any], *, is_split: bool, name: str = "deepseek2") -> dict[str, Any]:
    """Return the metadata of heads of attention over latents, of newer files or of older ones."""
    nope, rope, latent, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    )
    sizes = {"key_length": nope + rope, "value_length": value}
    if is_split:
        sizes = {f"{key}_mla": size for key, size in sizes.items()}
        sizes |= {"head_count_kv": 1, "key_length": latent + rope, "value_length": latent}
    sizes |= {"kv_lora_rank": latent} | ({"q_lora_rank": rank} if (rank := config.get("q_lora_rank")) else {})
    return {f"{name}.attention.{key}": size for key, size in sizes.items()} | {f"{name}.rope.dimension_count": rope}


def _split_groups(tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Return the rows of queries, keys and values, stored in groups of one KV head, one after the other."""
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_kv_heads", heads), config["hidden_size"] // heads
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, head_dim, *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _stored(name: str, tensor: Tensor, config: dict[str, Any], architecture: str) -> tuple[str, Tensor]:
    """Return a tensor as llama.cpp stores it: the layout of heads is Meta's, GPT-2's weights are [out, in]."""
    stem, _, part = name.rpartition(".")
    names = NAMES | _OWN_NAMES.get(architecture, {})
    if vector := next((own for end, own in _VECTORS.items() if name.endswith(end)), None):
        if architecture in HYBRIDS and architecture != "qwen3next":
            tensor = _tiled("", tensor, config)
        is_column = config["architectures"][0] in MAMBAS and vector in ("ssm_a", "ssm_d")
        stored = tensor.float().reshape(-1, 1) if is_column else tensor if tensor.dim() == 4 else tensor.flatten()
        return f"blk.{name.split('.')[2]}.{vector}", stored
    for prefix in ("model.layers.", "transformer.h.", "gpt_neox.layers.", "backbone.layers."):
        if stem.startswith(prefix):
            layer, _, stem = stem.removeprefix(prefix).partition(".")
            expert = _EXPERT.fullmatch(stem)
            module = f"{_EXPERT_NAMES[expert['module']]}.{expert['expert']}" if expert else names[stem]
            renamed = f"blk.{layer}.{module}.{part}"
            break
    else:
        renamed = f"{names[stem]}.{part}"
    if architecture == "gpt2" and stem.split(".")[-1].startswith("c_") and part == "weight":
        return renamed, tensor.T.contiguous()
    if architecture in ("gemma", "gemma2", "gemma3", *HYBRIDS) and stem.endswith("norm") and "ssm_norm" not in renamed:
        return renamed, tensor.float() + 1
    if stem.endswith("query_key_value"):
        return renamed, _split_groups(tensor, config)
    if "ssm_norm" in renamed and config["architectures"][0] in MAMBAS:
        tensor = tensor.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    if architecture in PERMUTED and stem in ("self_attn.q_proj", "self_attn.k_proj", "mixer.q_proj", "mixer.k_proj"):
        key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
        heads = config.get(key, config["num_attention_heads"])
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return renamed, halves.transpose(1, 2).reshape(tensor.shape)
    if architecture in HYBRIDS and architecture != "qwen3next" and ".linear_attn." in name:
        tensor = _tiled(stem, tensor, config)
    if part == "weight" and stem.endswith(("conv.conv", "conv1d")):
        tensor = tensor.unsqueeze(0) if architecture == "kimi-linear" else tensor.squeeze(1)
    return renamed, tensor


def _tiled(stem: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Return a tensor of a delta net with the value heads of one key head apart: the first of each, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if stem == "linear_attn.norm":
        return tensor
    if stem == "linear_attn.out_proj":
        return _tiled("", tensor.T, config).T.contiguous()
    first = 2 * keys * config["linear_key_head_dim"] if stem in ("linear_attn.in_proj_qkv", "linear_attn.conv1d") else 0
    own = tensor[first:]
    tiled = own.reshape(keys, values // keys, len(own) // values, *own.shape[1:]).transpose(0, 1).reshape(own.shape)
    return torch.cat([tensor[:first], tiled])


def _with_plain_groups(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors with the projections of Qwen3-Next's delta nets by queries, keys, values and gates, and rates."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            found[name] = -tensor.float().exp()
        elif name.endswith("in_proj_qkvz.weight"):
            keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
            own = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
            parts = tensor.view(keys, -1, tensor.shape[1]).split([dim, dim, own, own], dim=1)
            *qkv, z = (part.flatten(0, 1) for part in parts)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(qkv), z.contiguous()
        else:
            found[name] = tensor
    return found


def _with_plain_mlps(tensors: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors with the gates and ups of Granite 4 H apart, by the names of a shared expert or of a dense layer.
    """
    found, kind = dict[str, Tensor](), "shared_mlp" if config.get("num_local_experts") else "plain_mlp"
    for name, tensor in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = (part.contiguous() for part in tensor.chunk(2))
            found[name.replace("shared_mlp.input_linear", f"{kind}.gate_proj")] = gate
            found[name.replace("shared_mlp.input_linear", f"{kind}.up_proj")] = up
        else:
            found[name.replace("shared_mlp.output_linear", f"{kind}.down_proj")] = tensor
    return found


def dequantized(folder: Path, file: Path, twin: Path, dtype: torch.dtype) -> Path:
    """Write the folder that `file` was made from with the values of the file's tensors, in `dtype`; return it."""
    config = json.loads((folder / "config.json").read_text())
    source = read_gguf(file)
    checkpoint, tensors = source.open_tensors(source.quantization(QuantizationOptions())).checkpoint, {}
    for name, tensor in _without_heads(load_file(folder / "model.safetensors")).items():
        renamed, moved = _stored(name, tensor, config, str(source.file.metadata["general.architecture"]))
        values = to_tensor(checkpoint.read(renamed, 0, len(moved))).reshape(moved.shape)
        is_transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        tensors[name] = (values.T if is_transposed else values).reshape(tensor.shape).to(dtype).contiguous()
    twin.mkdir()
    save_file(tensors, twin / "model.safetensors")
    (twin / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return twin


# --- encoders of images -----------------------------------------------------------------------------------------------


def write_with_projector(folder: Path, target: Path, quantize: Quantize = as_is, **changes: Any) -> tuple[Path, Path]:  # noqa: ANN401
    """Write a model of images as llama.cpp's two files, of its text model and of its encoder; return both.

    `target`: an empty folder, which is given a folder of the text model, too. `changes`: of the text's metadata.
    """
    config = json.loads((folder / "config.json").read_text())
    family, (architecture,) = config["model_type"], config["architectures"]
    text = config["text_config"] | {"architectures": [{"gemma3": "Gemma3ForCausalLM"}.get(family, architecture)]}
    rope = text.get("rope_parameters") or {}
    text |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    (target / "config.json").write_text(json.dumps(text))
    tensors = {re.sub(r"^model\.language_model\.", "language_model.model.", name): each
               for name, each in load_file(folder / "model.safetensors").items()}  # fmt: skip
    is_own = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
    texts = {name.removeprefix("language_model."): each for name, each in tensors.items() if not is_own.match(name)}
    save_file(_with_split_experts(texts), target / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            (target / name).write_text((folder / name).read_text())
    own = {  # transformers 5 leaves a part of the published names out
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): each
        for name, each in tensors.items()
        if is_own.match(name)
    }
    write = _qwen_projector if "qwen" in family else _gemma3_projector if family == "gemma3" else _llava_projector
    if config["vision_config"]["model_type"] == "pixtral":
        write = _pixtral_projector
    metadata, stored = write(config, own, quantize)
    changed: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": None}  # files have none
    if "mrope_section" in rope:
        prefix, deep = ARCHITECTURES[architecture], config["vision_config"].get("deepstack_visual_indexes")
        changed[f"{prefix}.rope.dimension_sections"] = [*rope["mrope_section"], 0]
        changed |= {f"{prefix}.n_deepstack_layers": len(deep)} if deep else {}
    return (
        convert(target, target / "text.gguf", quantize, **changed | changes),
        write_gguf(target / "mmproj.gguf", metadata, stored),
    )


def _with_split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with those of each expert, which transformers 5 stacks, by themselves."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, module = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, each in enumerate(tensor):
            for part, rows in zip(("gate_proj", "up_proj"), each.chunk(2), strict=True) if "gate" in module else (
                ("down_proj", each),
            ):
                found[f"{stem}.{expert}.{part}.weight"] = rows.contiguous()
    return found


def _projector_metadata(config: dict[str, Any], kind: str) -> dict[str, Any]:
    vision = config["vision_config"]
    sizes = {
        "image_size": vision["image_size"], "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"], "feed_forward_length": vision["intermediate_size"],
        "attention.head_count": vision["num_attention_heads"],
        "attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }  # fmt: skip
    return {
        "general.architecture": "clip", "general.alignment": ALIGNMENT, "clip.has_vision_encoder": True,
        "clip.projector_type": kind, **{f"clip.vision.{key}": value for key, value in sizes.items()},
    }  # fmt: skip


def _llava_projector(
    config: dict[str, Any], tensors: Mapping[str, Tensor], quantize: Quantize
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return what tools/mtmd/legacy-models/convert_image_encoder_to_gguf.py of llama.cpp writes."""
    vision = config["vision_config"]
    num_layers = vision["num_hidden_layers"] - 1
    metadata = _projector_metadata(config, "mlp") | {
        "clip.has_text_encoder": False, "clip.has_llava_projector": True,
        "clip.vision.projection_dim": vision["projection_dim"], "clip.vision.block_count": num_layers,
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
        "clip.use_gelu": vision["hidden_act"] == "gelu",
    }  # fmt: skip
    stored = {}
    changes = (
        ("multi_modal_projector.linear_1", "mm.0"), ("multi_modal_projector.linear_2", "mm.2"), ("vision_tower.", ""),
        ("vision_model", "v"), ("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""), ("self_attn.", "attn_"),
        ("layer_norm", "ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("embedding", "embd"),
        ("layrnorm", "ln"),
    )  # fmt: skip
    for name, tensor in tensors.items():
        if "post_layernorm" in name or f"layers.{num_layers}." in name:
            continue
        renamed = name
        for old, new in changes:
            renamed = renamed.replace(old, new)
        stored[renamed] = quantize(renamed, tensor.squeeze())
    return metadata, stored


def _gemma3_projector(
    config: dict[str, Any], tensors: Mapping[str, Tensor], quantize: Quantize
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return what conversion/gemma.py of llama.cpp writes."""
    import gguf

    vision = config["vision_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    pool = vision["image_size"] // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
    metadata = _projector_metadata(config, "gemma3") | {
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.block_count": vision["num_hidden_layers"], "clip.use_gelu": True,
        "clip.vision.image_mean": [0.5, 0.5, 0.5], "clip.vision.image_std": [0.5, 0.5, 0.5],
    } | ({} if pool == 4 else {"clip.vision.projector.scale_factor": pool})  # fmt: skip
    stored = {}
    for name, tensor in tensors.items():
        renamed = names.get_name(name.replace("_weight", ".weight"), (".weight", ".bias"))
        stored[renamed] = quantize(renamed, tensor + 1 if "soft_emb_norm" in name else tensor)
    return metadata, stored


def _pixtral_projector(
    config: dict[str, Any], tensors: Mapping[str, Tensor], quantize: Quantize
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return what conversion/llava.py of llama.cpp writes, but for the embedding of [IMG_BREAK], which it copies."""
    import gguf

    vision = config["vision_config"] | {"layer_norm_eps": 1e-5}
    num_layers, heads = vision["num_hidden_layers"], vision["num_attention_heads"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(num_layers, 3))  # mm.2 is the third layer's
    metadata = _projector_metadata(config | {"vision_config": vision}, "pixtral") | {
        "clip.vision.projection_dim": config["text_config"]["hidden_size"], "clip.vision.block_count": num_layers,
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
        f"clip.use_{vision['hidden_act']}": True,
    } | ({"clip.vision.spatial_merge_size": merge} if (merge := config.get("spatial_merge_size")) else {})  # fmt: skip
    stored = {"v.token_embd.img_break": quantize("v.token_embd.img_break", torch.zeros(48))}
    for name, tensor in tensors.items():
        renamed = names.get_name(name.replace("vision_tower.vision_model.", "vision_tower."), (".weight", ".bias"))
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1) if "attention." in name else tensor
        is_moved = re.search("attention.[qk]_proj", name)
        stored[renamed] = quantize(renamed, halves.transpose(1, 2).reshape(tensor.shape) if is_moved else tensor)
    return metadata, stored


def _qwen_projector(
    config: dict[str, Any], tensors: Mapping[str, Tensor], quantize: Quantize
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return what conversion/qwenvl.py and conversion/qwen3vl.py of llama.cpp write."""
    import gguf

    vision, text = config["vision_config"], config["text_config"]
    num_layers, family = vision["depth"], config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(num_layers, 3))  # mm.2 is the third layer's
    is_third = "num_position_embeddings" in vision
    side = int(vision.get("num_position_embeddings", 1600) ** 0.5)
    vision |= {
        "image_size": side * vision["patch_size"], "num_attention_heads": vision["num_heads"], "layer_norm_eps": 1e-6,
        "intermediate_size": vision.get("intermediate_size", vision["hidden_size"]),
        "hidden_size": vision.get("embed_dim", vision["hidden_size"]),
    }  # fmt: skip
    kind = "qwen3vl_merger" if is_third else {"qwen2_vl": "qwen2vl_merger"}.get(family, "qwen2.5vl_merger")
    metadata = _projector_metadata(config, kind) | {
        "clip.vision.projection_dim": text["hidden_size"], "clip.vision.block_count": num_layers,
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    deep = vision.get("deepstack_visual_indexes", [])
    if is_third:
        metadata |= {
            "clip.use_gelu": True, "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
            "clip.vision.is_deepstack_layers": [layer in deep for layer in range(num_layers)],
        }  # fmt: skip
    elif family != "qwen2_vl":
        metadata |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1}
    stored = {}
    changes = {"merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "merger.norm": "v.post_ln"}
    for name, tensor in tensors.items():
        own, parts = name.removeprefix("model."), {"": tensor}
        stem, _, part = own.removeprefix("visual.").rpartition(".")
        if stem.startswith("deepstack"):
            _, index, module = stem.split(".")
            renamed = f"v.deepstack.{deep[int(index)]}.{module.removeprefix('linear_')}.{part}"
        elif stem in changes:
            renamed = f"{changes[stem]}.{part}"
        else:
            renamed = names.get_name(own, (".weight", ".bias"))
        if name.endswith("patch_embed.proj.weight"):
            parts = {"": tensor[:, :, 0], ".1": tensor[:, :, 1]}
        if ".qkv." in name and not is_third:
            stored |= {
                (each := renamed.replace("qkv", letter)): quantize(each, rows)
                for letter, rows in zip("qkv", tensor.chunk(3), strict=True)
            }
            continue
        stored |= {renamed + end: quantize(renamed, each) for end, each in parts.items()}
    return metadata, stored
