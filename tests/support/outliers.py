"""Outlier channels, as large models have them, in a small model: the same function, with weights that hide them."""

from torch import Tensor

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj")


def add_outliers(tensors: dict[str, Tensor], factor: float) -> None:
    """Scale a channel of every norm before linear layers of a Llama, and their weights for it by the inverse."""
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        layer, norm = name.removesuffix(".weight").rsplit(".", 1)
        channel = int(tensors[name].abs().argmax())
        for reader in ATTENTION if norm == "input_layernorm" else FEED_FORWARD:
            weight = tensors[f"{layer}.{reader}.weight"].clone()
            weight[:, channel] /= factor
            tensors[f"{layer}.{reader}.weight"] = weight
        tensors[name] = tensors[name].clone()
        tensors[name][channel] *= factor
