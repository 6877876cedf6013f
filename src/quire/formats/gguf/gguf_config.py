"""Model config of a GGUF file: its architecture's metadata as keys of config.json, and names of its tensors.

The families of `quire.model.families` read the result as they read a folder's config.json.

Where a family has a choice that the metadata does not name (biases, norms, a tied head), the tensor table decides.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.formats.gguf import families
from quire.formats.gguf.families import ROPE_FREQS, of_family
from quire.formats.gguf.gguf_file import MAX_TENSORS, GGUFFile, Metadata, TensorEntry
from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.spec import DecoderSpec, DeltaNet, ExpertNames, LayerSpec, Mamba, WeightMap, with_mtp

MAX_ENTRIES = 4 * MAX_TENSORS
STACKED = {"_exps.weight": 3, "_exps.bias": 2}  # and their dimensions
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
EXPERT_NAMES = ExpertNames(
    router="ffn_gate_inp", router_bias="exp_probs_b.bias", expert_in=("ffn_gate.{expert}", "ffn_up.{expert}"),
    expert_out="ffn_down.{expert}",
    shared_gate="ffn_gate_inp_shexp", shared_in=("ffn_gate_shexp", "ffn_up_shexp"), shared_out="ffn_down_shexp",
    stacked=(),
)  # fmt: skip
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
    harmless=(ROPE_FREQS, *families.ROPE_FACTORS, "attn_rot_embd.weight", "attn.rot_embd"),
)
_EXPERT_WEIGHTS = replace(_LLAMA_WEIGHTS, experts=EXPERT_NAMES)
_OLMO2_WEIGHTS = replace(_LLAMA_WEIGHTS, attention_norm="post_attention_norm", feed_forward_norm="post_ffw_norm")
_GEMMA2_WEIGHTS = replace(
    _LLAMA_WEIGHTS, attention_output_norm="post_attention_norm", feed_forward_output_norm="post_ffw_norm"
)
_GEMMA4_WEIGHTS = replace(
    _GEMMA2_WEIGHTS, layer_scale="layer_output_scale.weight", layer_table="per_layer_token_embd",
    layer_projection="per_layer_model_proj", layer_projection_norm="per_layer_proj_norm", layer_gate="inp_gate",
    layer_out="proj", layer_output_norm="post_norm", renamed={"ffn_gate_inp.scale": "ffn_gate_inp.scale.weight"},
    experts=replace(
        EXPERT_NAMES, router_scales="ffn_down_exps.scale", router_norm="ffn_gate_inp.scale", norm="pre_ffw_norm_2",
        output_norm="post_ffw_norm_2", dense_output_norm="post_ffw_norm_1",
    ),
)  # fmt: skip
_PHI3_WEIGHTS = replace(_LLAMA_WEIGHTS, qkv=("attn_qkv",), feed_forward_in=("ffn_up",))
_GLM4_WEIGHTS = replace(_GEMMA2_WEIGHTS, feed_forward_in=("ffn_up",))
_GPT2_WEIGHTS = replace(_PHI3_WEIGHTS, positions="position_embd")
# Falcon with a norm for each of its parallel sublayers.
_FALCON_WEIGHTS = replace(_GPT2_WEIGHTS, positions=None, attention_norm="attn_norm_2", feed_forward_norm="attn_norm")
_GPT_OSS_WEIGHTS = replace(_EXPERT_WEIGHTS, feed_forward_norm="post_attention_norm", sinks="attn_sinks.weight")
_GLM4_MOE_WEIGHTS = replace(_EXPERT_WEIGHTS, feed_forward_norm="post_attention_norm")
_LATENT_WEIGHTS = replace(
    _EXPERT_WEIGHTS, qkv=("attn_q_a", "attn_kv_a_mqa"), query_norm="attn_q_a_norm", key_norm="attn_kv_a_norm",
    query_up="attn_q_b", kv_up=("attn_k_b", "attn_v_b"),
)  # fmt: skip
_KIMI_WEIGHTS = replace(
    _LATENT_WEIGHTS, delta_in=("attn_q", "attn_k", "attn_v"), delta_rates=("ssm_beta",),
    delta_gates=("ssm_g_a", "ssm_g_b"), delta_decays=("ssm_f_a", "ssm_f_b"), delta_rate="ssm_a",
    delta_conv=("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), delta_rate_bias="ssm_dt.bias", delta_norm="ssm_norm",
    delta_out="attn_output", is_conv_plain=True,
)  # fmt: skip
_LFM2_WEIGHTS = replace(
    _EXPERT_WEIGHTS, final_norm="token_embd_norm", conv_in="shortconv.in_proj", conv="shortconv.conv",
    conv_out="shortconv.out_proj", is_conv_plain=True,
)  # fmt: skip
_QWEN3_5_WEIGHTS = replace(
    _EXPERT_WEIGHTS, feed_forward_norm="post_attention_norm", delta_in=("attn_qkv", "attn_gate"),
    delta_rates=("ssm_beta", "ssm_alpha"), delta_conv=("ssm_conv1d",), delta_rate="ssm_a",
    delta_rate_bias="ssm_dt.bias", delta_norm="ssm_norm", delta_out="ssm_out", is_conv_plain=True,
)  # fmt: skip
_QWEN3_NEXT_WEIGHTS = replace(_QWEN3_5_WEIGHTS, delta_rates=("ssm_ba",))
_MAMBA_WEIGHTS = replace(
    _EXPERT_WEIGHTS, mamba_in="ssm_in", mamba_conv="ssm_conv1d", mamba_rate="ssm_a", mamba_rate_bias="ssm_dt.bias",
    mamba_skip="ssm_d", mamba_norm="ssm_norm", mamba_out="ssm_out", is_conv_plain=True,
)  # fmt: skip
_NEMOTRON_WEIGHTS = replace(
    _MAMBA_WEIGHTS, feed_forward_norm="attn_norm", feed_forward_in=("ffn_up",),
    experts=replace(EXPERT_NAMES, expert_in=("ffn_up.{expert}",), shared_in=("ffn_up_shexp",)),
)  # fmt: skip
_BIASED_EXPERTS = "leading_dense_block_count", "expert_weights_scale", "expert_gating_func"
_GROUPED_EXPERTS = *_BIASED_EXPERTS, "expert_group_count"


class Architecture(NamedTuple):
    """An architecture of GGUF: `to_config` makes config.json's keys; `has_permuted_heads` as in `permuted_tensors`.

    `reads`: keys that other architectures refuse. `has_raised_norms`: the weights of norms are stored plus 1. `flags`:
    config.json's flags that are true where the file has a tensor. `has_tiled_heads`: value heads of gated delta nets
    that share a key head are not neighbours.
    """

    to_config: Callable[[Metadata], dict[str, object]]
    weights: WeightMap
    has_permuted_heads: bool = False
    reads: tuple[str, ...] = ()
    has_raised_norms: bool = False
    flags: Mapping[str, str] = {}
    has_tiled_heads: bool = False


ARCHITECTURES = {
    "llama": Architecture(
        families.llama, _EXPERT_WEIGHTS, has_permuted_heads=True,
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "qwen2": Architecture(partial(of_family, family="Qwen2ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen3": Architecture(partial(of_family, family="Qwen3ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen2vl": Architecture(partial(of_family, family="Qwen2ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen3vl": Architecture(partial(of_family, family="Qwen3ForCausalLM"), _LLAMA_WEIGHTS),
    "granite": Architecture(
        families.granite, _LLAMA_WEIGHTS, has_permuted_heads=True,
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "smollm3": Architecture(
        partial(of_family, family="SmolLM3ForCausalLM"), _LLAMA_WEIGHTS, has_permuted_heads=True,
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "olmo": Architecture(families.olmo, _LLAMA_WEIGHTS, has_permuted_heads=True, reads=("attention.clamp_kqv",)),
    "mistral3": Architecture(
        families.mistral3, _LLAMA_WEIGHTS, has_permuted_heads=True,
        reads=("rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
    ),
    "olmo2": Architecture(families.olmo2, _OLMO2_WEIGHTS),
    "phi3": Architecture(families.phi3, _PHI3_WEIGHTS),
    "glm4": Architecture(
        partial(of_family, family="Glm4ForCausalLM", turns_part=True), _GLM4_WEIGHTS,
        flags={"attention_bias": QUERY_BIAS},
    ),
    "gemma": Architecture(partial(of_family, family="GemmaForCausalLM"), _LLAMA_WEIGHTS, has_raised_norms=True),
    "gemma2": Architecture(
        families.gemma2, _GEMMA2_WEIGHTS, has_raised_norms=True,
        reads=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(families.gemma3, _GEMMA2_WEIGHTS, has_raised_norms=True),
    "gemma4": Architecture(families.gemma4, _GEMMA4_WEIGHTS, reads=("final_logit_softcapping",)),
    "command-r": Architecture(
        partial(families.cohere, family="CohereForCausalLM"), _LLAMA_WEIGHTS, reads=("logit_scale",),
        flags={"attention_bias": QUERY_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        partial(families.cohere, family="Cohere2ForCausalLM"), _LLAMA_WEIGHTS, reads=("logit_scale",),
        flags={"attention_bias": QUERY_BIAS},
    ),
    "stablelm": Architecture(
        families.stablelm, _LLAMA_WEIGHTS,
        flags={"use_qkv_bias": QUERY_BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
    ),
    "falcon": Architecture(families.falcon, _FALCON_WEIGHTS, flags={"bias": "blk.0.attn_qkv.bias"}),
    "gptneox": Architecture(families.gpt_neox, _PHI3_WEIGHTS, flags={"attention_bias": "blk.0.attn_qkv.bias"}),
    "gpt2": Architecture(families.gpt2, _GPT2_WEIGHTS),
    "olmoe": Architecture(partial(of_family, family="OlmoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen2moe": Architecture(partial(of_family, family="Qwen2MoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen3moe": Architecture(partial(of_family, family="Qwen3MoeForCausalLM"), _EXPERT_WEIGHTS),
    "qwen3vlmoe": Architecture(partial(of_family, family="Qwen3MoeForCausalLM"), _EXPERT_WEIGHTS),
    "qwen3next": Architecture(
        partial(families.qwen_hybrid, family="Qwen3NextForCausalLM"), _QWEN3_NEXT_WEIGHTS, has_raised_norms=True
    ),
    "qwen35": Architecture(
        partial(families.qwen_hybrid, family="Qwen3_5ForCausalLM"), replace(_QWEN3_5_WEIGHTS, experts=None),
        has_raised_norms=True, has_tiled_heads=True,
    ),
    "qwen35moe": Architecture(
        partial(families.qwen_hybrid, family="Qwen3_5MoeForCausalLM"), _QWEN3_5_WEIGHTS, has_raised_norms=True,
        has_tiled_heads=True,
    ),
    "glm4moe": Architecture(
        families.glm4_moe, _GLM4_MOE_WEIGHTS, reads=_GROUPED_EXPERTS, flags={"attention_bias": QUERY_BIAS}
    ),
    "deepseek2": Architecture(
        families.deepseek2, _LATENT_WEIGHTS, reads=(*_GROUPED_EXPERTS, "rope.scaling.yarn_log_multiplier")
    ),
    "kimi-linear": Architecture(families.kimi_linear, _KIMI_WEIGHTS, reads=_GROUPED_EXPERTS),
    "dots1": Architecture(families.dots1, _EXPERT_WEIGHTS, reads=_GROUPED_EXPERTS),
    "minimax-m2": Architecture(families.minimax_m2, _EXPERT_WEIGHTS, reads=_BIASED_EXPERTS),
    "ernie4_5-moe": Architecture(families.ernie4_5_moe, _EXPERT_WEIGHTS, reads=_BIASED_EXPERTS),
    "granitehybrid": Architecture(
        families.granite_hybrid, _MAMBA_WEIGHTS, has_permuted_heads=True, reads=tuple(families.GRANITE_FACTORS)
    ),
    "falcon-h1": Architecture(families.falcon_h1, replace(_MAMBA_WEIGHTS, experts=None)),
    "nemotron_h": Architecture(
        families.nemotron_h, replace(_NEMOTRON_WEIGHTS, experts=None), has_permuted_heads=True
    ),
    "nemotron_h_moe": Architecture(
        families.nemotron_h, _NEMOTRON_WEIGHTS, has_permuted_heads=True, reads=_GROUPED_EXPERTS
    ),
    "lfm2": Architecture(families.lfm2, replace(_LFM2_WEIGHTS, experts=None)),
    "lfm2moe": Architecture(families.lfm2_moe, _LFM2_WEIGHTS, reads=_BIASED_EXPERTS),
    "gpt-oss": Architecture(families.gpt_oss, _GPT_OSS_WEIGHTS, flags={"attention_bias": QUERY_BIAS}),
}


def with_single_experts(file: GGUFFile) -> dict[str, TensorEntry]:
    """Return the table with entries of single experts. ModelError for stacked tensors that are none, or too many."""
    found: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        ending = next((ending for ending in STACKED if name.endswith(ending)), None)
        if ending is None:
            is_vector = name.endswith(SHARED_GATE) and len(entry.shape) == 1
            found[name] = entry._replace(shape=(1, *entry.shape) if is_vector else _stored_shape(name, entry.shape))
            continue
        stem, count, size = name.removesuffix(ending), entry.shape[0], entry.num_bytes // entry.shape[0]
        if len(entry.shape) != STACKED[ending] or len(found) + count > MAX_ENTRIES:
            expected = "[experts, rows, width]" if STACKED[ending] == 3 else "[experts, rows]"
            limit = f"expected {expected}, of at most {MAX_ENTRIES} tensors of experts in all"
            raise file.error(f"tensor {name!r} has shape {list(entry.shape)}, {limit}")
        for number in range(count):
            place, part = entry.offset + number * size, ending.rpartition(".")[2]
            found[f"{stem}.{number}.{part}"] = TensorEntry(entry.type, entry.shape[1:], place, size)
    return found


def _stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape; those of recurrent layers lose dimensions of 1, of which quantizers drop some."""
    sizes = list(shape)
    while ".ssm_" in name and len(sizes) > 2 and 1 in sizes[:-1]:
        sizes.remove(1)
    return tuple(sizes)


TOKENS = "tokenizer.ggml.tokens"
_UNSERVED = (  # keys of computations that none of the families here has
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale", "leading_dense_block_count",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "attention.temperature_scale",
)  # fmt: skip
_UNSERVED_UNLESS = {
    "attention.causal": (True,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "rope.scaling.yarn_ext_factor": (1, -1),
}  # fmt: skip


def read_gguf_config(file: GGUFFile) -> dict[str, object]:
    """Return the config.json of a file. ModelError names the key that is missing, wrong or not supported."""
    metadata = Metadata(file, _architecture_name(file))
    num_parts = ConfigReader(file.metadata, str(file.path)).size("split.count", 1, least=0)
    if num_parts > 1:
        raise file.error(f"is one of {num_parts} parts of a model; llama-gguf-split --merge makes one file of them")
    architecture = ARCHITECTURES[_architecture_name(file)]
    for key in set(_UNSERVED).difference(architecture.reads):
        metadata.reject(key, 0, why="no family here computes with it")
    for key in _UNSERVED_UNLESS.keys() - set(architecture.reads):
        metadata.reject(key, *_UNSERVED_UNLESS[key], why="no family here computes with it")
    if architecture.weights.experts is None:
        metadata.reject("expert_count", 0, why="no family here computes with it")
    config = architecture.to_config(metadata) | {key: name in file.tensors for key, name in architecture.flags.items()}
    return config | {"vocab_size": metadata.rows("token_embd.weight"), "dtype": _dtype(file),
                     "tie_word_embeddings": "output.weight" not in file.tensors}


def with_gguf_weights(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """Return the spec of a file's config, with the file's names of tensors and rotary frequencies."""
    architecture = ARCHITECTURES[_architecture_name(file)]
    names = architecture.weights
    if spec.weights.feed_forward_norm is None:  # parallel sublayers share a norm
        names = replace(names, attention_norm="attn_norm", feed_forward_norm=None)
    if names.kv_up:
        first = next(f"blk.{index}." for index, layer in enumerate(spec.layers) if layer.attention is not None)
        has_rank = f"{first}attn_q_a.weight" in file.tensors
        kv_up = ("attn_kv_b",) if f"{first}attn_kv_b.weight" in file.tensors else names.kv_up
        names = replace(names, qkv=names.qkv if has_rank else ("attn_q", names.qkv[1]), kv_up=kv_up)
    num_blocks = Metadata(file, _architecture_name(file)).size("block_count", limit=MAX_LAYERS)
    later = tuple(f"blk.{layer}." for layer in range(spec.num_layers, num_blocks))  # they predict later tokens
    if names.experts is not None and "blk.0.ffn_gate_up.0.weight" in file.tensors:
        names = replace(names, experts=replace(names.experts, expert_in=("ffn_gate_up.{expert}",)))
    shared = (i for i, layer in enumerate(spec.layers) if layer.attention and layer.attention.cache_layer is not None)
    unread = (f"blk.{layer}.attn_{part}." for layer in shared for part in ("k", "v", "k_norm"))
    spec = replace(spec, weights=replace(names, skipped=(*later, *unread)))
    if spec.has_states:
        spec = spec.with_layers(partial(_as_stored, is_tiled=architecture.has_tiled_heads))
    if spec.rotary is not None and spec.rotary.divisors is None and ROPE_FREQS in file.tensors:
        divisors = Metadata(file, _architecture_name(file)).divisors(ROPE_FREQS, spec.head_dim // 2)
        spec = replace(spec, rotary=replace(spec.rotary, divisors=divisors))
    return _with_head(spec, file)


def _with_head(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """Return the spec with the MTP head of a file, the block behind the last layer; without one, if it has none.

    Copies of the embeddings and of the output head beside it are those of the model in published checkpoints.
    """
    block = f"blk.{spec.num_layers}."
    if f"{block}nextn.eh_proj.weight" not in file.tensors:
        return replace(spec, mtp=None)
    return with_mtp(
        spec, prefixes=(block,), layer="", mtp_norms=("nextn.enorm", "nextn.hnorm"),
        mtp_projection="nextn.eh_proj", final_norm="nextn.shared_head_norm",
    )  # fmt: skip


def _as_stored(layer: LayerSpec, *, is_tiled: bool) -> LayerSpec:
    """Return a layer with what files store of a gated delta net, or a Mamba-2, in another form."""
    if layer.beside is not None:
        return replace(layer, beside=replace(layer.beside, has_plain_rate=True))
    if isinstance(layer.mixer, Mamba):
        return replace(layer, mixer=replace(layer.mixer, has_plain_rate=True))
    if not isinstance(layer.mixer, DeltaNet):
        return layer
    return replace(layer, mixer=replace(layer.mixer, is_tiled=is_tiled, has_plain_rate=True))


def gguf_eos_token_ids(file: GGUFFile, vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer: those that the metadata names, and those of texts that are known to end one.

    Files have one end-of-sequence token where generation_config.json lists several.
    """
    reader = ConfigReader(file.metadata, str(file.path))
    roles = ("eos", "eot", "eom", *CODE_ENDS)
    keys = {role: f"tokenizer.ggml.{role}_token_id" for role in roles}
    named = {role: reader.size(key, least=0, limit=vocab_size - 1) for role, key in keys.items() if reader.has(key)}
    known = ENDS.union(*(texts for role, texts in CODE_ENDS.items() if role not in named))
    places = file.places(TOKENS, known) if TOKENS in file.metadata else {}
    ids = {token: place for token, place in places.items() if place < vocab_size}
    ends = {*named.values(), *ids.values()}
    return frozenset(ends - {ids[end] for end, beside in NO_ENDS if end in ids and ids.keys() >= beside})


def permuted_tensors(spec: DecoderSpec, file: GGUFFile) -> dict[str, int]:
    """Return the tensors with permuted heads, by name, and the dimensions of a head of each.

    llama.cpp turns neighbouring dimensions of a head together, Hugging Face's Llama dimension i with i + head_dim / 2:
    its converter moves the rows of query and key projections of these architectures.
    """
    if not ARCHITECTURES[_architecture_name(file)].has_permuted_heads:
        return {}
    names = (f"blk.{layer}.{module}.{part}" for layer in range(spec.num_layers)
             for module in ("attn_q", "attn_k") for part in ("weight", "bias"))
    return {name: spec.head_dim for name in names if name in file.tensors}


def raised_tensors(file: GGUFFile) -> frozenset[str]:
    """Return the names of tensors that llama.cpp stores plus 1: the norms of Gemma, and most of Qwen3.5's."""
    if not ARCHITECTURES[_architecture_name(file)].has_raised_norms:
        return frozenset()
    names = (name for name in file.tensors if name.endswith("norm.weight"))
    return frozenset(name for name in names if not name.endswith(".ssm_norm.weight"))


def _architecture_name(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise file.error(f"general.architecture must be one of {', '.join(ARCHITECTURES)}, got {name!r:.80}")
    return name


def _dtype(file: GGUFFile) -> str:
    """Return the dtype of a model: that of most elements of its matrices, and bfloat16 if they are quantized."""
    counts: Counter[str] = Counter()
    for entry in file.tensors.values():
        counts[entry.type.name] += math.prod(entry.shape) if len(entry.shape) > 1 else 0
    kinds = [kind for kind, _ in counts.most_common(1)]
    return {"F32": "float32", "F16": "float16"}.get(kinds[0], "bfloat16") if kinds else "bfloat16"


ENDS = frozenset((  # texts that end an answer
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# Tokens of code models that end an answer, by the key that may name another one instead of these texts.
CODE_ENDS: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens that all stand beside an end in vocabularies where that ends a message or nothing, but no answer.
NO_ENDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("<|end|>", frozenset(("<|return|>", "<|call|>"))),  # gpt-oss
    ("<|end|>", frozenset(("<|return|>", "<|calls|>"))),
    ("<|end|>", frozenset(("<|flush|>", "<|call|>"))),
    ("<|end|>", frozenset(("<|flush|>", "<|calls|>"))),  # Solar Open
    ("</s>", frozenset(("<|tool_response>",))),          # Gemma 4
)
# Other texts of special tokens: what code models have around the parts of a file.
_CODE_PARTS = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
    "▁<MID>", "<|code_middle|>", "<|middle|>",
)  # fmt: skip
CONTROL_TEXTS = ENDS.union(_CODE_PARTS, *CODE_ENDS.values())
