"""Architectures of GGUF files: their metadata as the keys of config.json, and llama.cpp's names of their tensors.

Where a family has a choice that the metadata does not name (biases, norms, a tied head), the tensor table decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.formats.gguf import families
from quire.formats.gguf.families import of_family
from quire.formats.gguf.gguf_file import MAX_TENSORS, GGUFFile, Metadata, TensorEntry
from quire.model.spec import ExpertNames, WeightMap

MAX_ENTRIES = 4 * MAX_TENSORS
STACKED = {"_exps.weight": 3, "_exps.bias": 2}  # and their dimensions
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
EXPERT_NAMES = ExpertNames(
    router="ffn_gate_inp", expert_in=("ffn_gate.{expert}", "ffn_up.{expert}"), expert_out="ffn_down.{expert}",
    shared_gate="ffn_gate_inp_shexp", shared_in=("ffn_gate_shexp", "ffn_up_shexp"), shared_out="ffn_down_shexp",
    stacked=(),
)  # fmt: skip
ROPE_FREQS = "rope_freqs.weight"
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

    to_config: Callable[[Metadata], dict[str, object]]
    weights: WeightMap
    has_permuted_heads: bool = False
    reads: tuple[str, ...] = ()
    has_raised_norms: bool = False
    flags: Mapping[str, str] = {}


ARCHITECTURES = {
    "llama": Architecture(
        families.llama, _EXPERT_WEIGHTS, has_permuted_heads=True,
        flags={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"},
    ),
    "qwen2": Architecture(partial(of_family, family="Qwen2ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen3": Architecture(partial(of_family, family="Qwen3ForCausalLM"), _LLAMA_WEIGHTS),
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
    "gpt-oss": Architecture(families.gpt_oss, _GPT_OSS_WEIGHTS, flags={"attention_bias": QUERY_BIAS}),
}


def with_single_experts(file: GGUFFile) -> dict[str, TensorEntry]:
    """Return the table with entries of single experts. ModelError for stacked tensors that are none, or too many."""
    found: dict[str, TensorEntry] = {}
    for name, entry in file.tensors.items():
        ending = next((ending for ending in STACKED if name.endswith(ending)), None)
        if ending is None:
            is_vector = name.endswith(SHARED_GATE) and len(entry.shape) == 1
            found[name] = entry._replace(shape=(1, *entry.shape)) if is_vector else entry
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
