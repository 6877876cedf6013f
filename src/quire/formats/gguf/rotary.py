"""Keys of config.json that all families with rotary positions have, from the metadata of a GGUF file."""

import math

from quire.formats.gguf.metadata import Metadata
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


def rotary_decoder(
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
