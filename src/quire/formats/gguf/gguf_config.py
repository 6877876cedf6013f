"""Model config of a GGUF file: what its architecture makes of its metadata, and what all of them have alike.

The families of `quire.model.families` read the result as they read a folder's config.json.
"""

import math
from collections import Counter
from dataclasses import replace

from quire.formats.gguf.gguf_architectures import ARCHITECTURES, ROPE_FREQS
from quire.formats.gguf.gguf_file import GGUFFile, Metadata
from quire.model.config_reader import ConfigReader
from quire.model.spec import DecoderSpec

TOKENS = "tokenizer.ggml.tokens"
_UNSERVED = (  # keys of computations that none of the families here has
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale", "leading_dense_block_count",
    "expert_group_count", "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "attention.temperature_scale",
)  # fmt: skip
_UNSERVED_UNLESS = {
    "attention.causal": (True,), "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1),
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
    for key, harmless in _UNSERVED_UNLESS.items():
        metadata.reject(key, *harmless, why="no family here computes with it")
    if architecture.weights.experts is None:
        metadata.reject("expert_count", 0, why="no family here computes with it")
    config = architecture.to_config(metadata) | {key: name in file.tensors for key, name in architecture.flags.items()}
    return config | {"vocab_size": metadata.rows("token_embd.weight"), "dtype": _dtype(file),
                     "tie_word_embeddings": "output.weight" not in file.tensors}


def with_gguf_weights(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """Return the spec of a file's config, with the file's names of tensors and rotary frequencies."""
    names = ARCHITECTURES[_architecture_name(file)].weights
    if spec.weights.feed_forward_norm is None:  # parallel sublayers share a norm
        names = replace(names, attention_norm="attn_norm", feed_forward_norm=None)
    spec = replace(spec, weights=names)
    if spec.rotary is None or ROPE_FREQS not in file.tensors:
        return spec
    divisors = Metadata(file, _architecture_name(file)).divisors(ROPE_FREQS, spec.head_dim // 2)
    return replace(spec, rotary=replace(spec.rotary, divisors=divisors))


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
