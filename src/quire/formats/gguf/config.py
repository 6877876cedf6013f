"""Model config of a GGUF file: its metadata as the keys of config.json, and the names of its tensors.

The families of `quire.model.families` read the result as they read a folder's config.json. Where a family has a choice
that the metadata does not name (biases, a tied head), the tensor table decides.
"""

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.formats.gguf import experts
from quire.formats.gguf.file import GGUFFile
from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.spec import DecoderSpec, WeightMap

ROPE_FREQS = "rope_freqs.weight"
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
CONTROL = 3  # of the types of tokens
GEMMA2_27B_LAYERS = 46
_ENDS = frozenset((  # those of llama.cpp, for the families here
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<EOT>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
))  # fmt: skip
_UNSERVED = (  # keys of computations that none of the families here has
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale", "leading_dense_block_count",
    "expert_group_count", "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha",
)  # fmt: skip
_UNSERVED_UNLESS = {
    "attention.causal": (True,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
    "rope.scaling.yarn_ext_factor": (1, -1), "rope.scaling.yarn_attn_factor": (1,),
}  # fmt: skip
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
_GPT2_WEIGHTS = replace(_LLAMA_WEIGHTS, qkv=("attn_qkv",), feed_forward_in=("ffn_up",), positions="position_embd")


class Architecture(NamedTuple):
    """An architecture of GGUF: `to_config` makes config.json's keys; `has_permuted_heads` as of `permuted_tensors`.

    `reads`: keys that other architectures refuse. `has_raised_norms`: the weights of norms are stored plus 1.
    """

    to_config: Callable[["Metadata"], dict[str, object]]
    weights: WeightMap
    has_permuted_heads: bool = False
    reads: tuple[str, ...] = ()
    has_raised_norms: bool = False


class Metadata:
    """The metadata of a file's architecture: values by the keys behind its name."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._architecture = architecture
        self._reader = ConfigReader(file.metadata, str(file.path))

    def has(self, key: str) -> bool:
        """Return whether the key is present."""
        return self._reader.has(self._key(key))

    def size(self, key: str, default: int | None = None, *, least: int = 1, limit: int = 2**24) -> int:
        """Return an integer in [least, limit]."""
        return self._reader.size(self._key(key), default, least=least, limit=limit)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number that is not negative."""
        return self._reader.number(self._key(key), default)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """Return the entry of `choices` for a string."""
        return self._reader.choice(self._key(key), choices, default)

    def reject(self, key: str, *harmless: object, why: str) -> None:
        """Refuse any value of a key but the harmless ones."""
        self._reader.reject(self._key(key), *harmless, why=why)

    def rows(self, name: str) -> int:
        """Return the rows of a tensor, which must be there."""
        if name not in self.file.tensors:
            raise self.file.error(f"tensor {name} is missing")
        return self.file.tensors[name].shape[0]

    def _key(self, key: str) -> str:
        return f"{self._architecture}.{key}"


def read_gguf_config(file: GGUFFile) -> dict[str, object]:
    """Return the config.json of a file. ModelError names the key that is missing, wrong or not supported."""
    metadata = Metadata(file, _architecture_name(file))
    num_parts = ConfigReader(file.metadata, str(file.path)).size("split.count", 1, least=0)
    if num_parts > 1:
        raise file.error(f"is one of {num_parts} parts of a model; llama-gguf-split --merge makes one file of them")
    architecture = ARCHITECTURES[_architecture_name(file)]
    for key in set(_UNSERVED).difference(architecture.reads):
        metadata.reject(key, 0, why="no family here computes with it")
    for key, harmless in _UNSERVED_UNLESS.items():
        metadata.reject(key, *harmless, why="no family here computes with it")
    if architecture.weights.experts is None:
        metadata.reject("expert_count", 0, why="no family here computes with it")
    config = architecture.to_config(metadata)
    return config | {"vocab_size": metadata.rows("token_embd.weight"), "dtype": _dtype(file),
                     "tie_word_embeddings": "output.weight" not in file.tensors}


def with_gguf_weights(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """Return the spec of a file's config, with the file's names of tensors and rotary frequencies."""
    spec = replace(spec, weights=ARCHITECTURES[_architecture_name(file)].weights)
    if spec.rotary is None or ROPE_FREQS not in file.tensors:
        return spec
    return replace(spec, rotary=replace(spec.rotary, divisors=_rope_divisors(file, spec.head_dim // 2)))


def gguf_eos_token_ids(file: GGUFFile, vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer: those that the metadata names, and special tokens that are known to end one.

    Files have one end-of-sequence token where generation_config.json lists several; llama.cpp finds the rest by their
    texts, too.
    """
    reader = ConfigReader(file.metadata, str(file.path))
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = {reader.size(key, least=0, limit=vocab_size - 1) for key in keys if reader.has(key)}
    if TOKENS not in file.metadata or TOKEN_TYPES not in file.metadata:
        return frozenset(named)
    types = zip(file.strings(TOKENS)[:vocab_size], file.numbers(TOKEN_TYPES), strict=False)
    known = {index for index, (token, kind) in enumerate(types) if kind == CONTROL and token in _ENDS}
    return frozenset(named | known)


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
    """Return the names of tensors that llama.cpp stores plus 1: the norms of Gemma."""
    if not ARCHITECTURES[_architecture_name(file)].has_raised_norms:
        return frozenset()
    return frozenset(name for name in file.tensors if name.endswith("norm.weight"))


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


def _rope_divisors(file: GGUFFile, num_pairs: int) -> tuple[float, ...]:
    """Return the number by which the frequency of each pair is divided: Llama 3.1's scaling."""
    entry = file.tensors[ROPE_FREQS]
    if entry.type.name != "F32" or entry.shape != (num_pairs,):
        raise file.error(f"tensor {ROPE_FREQS} must be F32 of shape {[num_pairs]}, and is {entry.type.name} of shape "
                         f"{list(entry.shape)}")
    divisors = struct.unpack_from(f"<{num_pairs}f", file.map, entry.offset)
    if not all(math.isfinite(each) and each > 0 for each in divisors):
        raise file.error(f"tensor {ROPE_FREQS} has values that are not above 0")
    return divisors


def _llama(metadata: Metadata) -> dict[str, object]:
    config = _of_family(metadata, "MixtralForCausalLM")
    if "num_experts" in config:
        return config
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in metadata.file.tensors,
    }
    if metadata.has("attention.sliding_window"):
        window = metadata.size("attention.sliding_window", least=0)
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window or None}
    return config


def _of_family(metadata: Metadata, family: str, *, is_normalized: bool = True) -> dict[str, object]:
    """Return the keys of a family with rotary positions; `is_normalized` is about the weights of experts."""
    config = _rotary_decoder(metadata) | {"architectures": [family]}
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
    """Return the keys of a Gemma 2. Files do not have the factor on scores: 27B, known by its layers, differs."""
    config = _rotary_decoder(metadata)
    hidden_size, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    is_27b = config["num_hidden_layers"] == GEMMA2_27B_LAYERS
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": hidden_size // num_heads if is_27b else config["head_dim"],
    }


def _rotary_decoder(metadata: Metadata, *, turns_part: bool = False) -> dict[str, object]:
    """Return the keys that all families with rotary positions have; `turns_part`: heads may be rotated in part."""
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
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        **({"partial_rotary_factor": rotated / head_dim} if turns_part else {}),
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
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


ARCHITECTURES = {
    "llama": Architecture(_llama, _EXPERT_WEIGHTS, has_permuted_heads=True),
    "qwen2": Architecture(partial(_of_family, family="Qwen2ForCausalLM"), _LLAMA_WEIGHTS),
    "qwen3": Architecture(partial(_of_family, family="Qwen3ForCausalLM"), _LLAMA_WEIGHTS),
    "granite": Architecture(
        _granite, _LLAMA_WEIGHTS, has_permuted_heads=True,
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "olmo2": Architecture(_olmo2, _OLMO2_WEIGHTS),
    "phi3": Architecture(_phi3, _PHI3_WEIGHTS),
    "gemma2": Architecture(
        _gemma2, _GEMMA2_WEIGHTS, reads=("attn_logit_softcapping", "final_logit_softcapping"), has_raised_norms=True,
    ),
    "gpt2": Architecture(_gpt2, _GPT2_WEIGHTS),
    "olmoe": Architecture(partial(_of_family, family="OlmoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen2moe": Architecture(partial(_of_family, family="Qwen2MoeForCausalLM", is_normalized=False), _EXPERT_WEIGHTS),
    "qwen3moe": Architecture(partial(_of_family, family="Qwen3MoeForCausalLM"), _EXPERT_WEIGHTS),
}
