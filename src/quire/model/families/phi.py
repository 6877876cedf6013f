"""Phi-3 and Phi-4: Llama with fused projections, partial rotary embeddings and longrope (Abdin et al. 2024)."""

from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import DecoderSpec

NORM_EPS = 1e-5
ORIGINAL_POSITIONS = 4096
WEIGHTS = replace(LLAMA_WEIGHTS, qkv=("self_attn.qkv_proj",), feed_forward_in=("mlp.gate_up_proj",))


def phi3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Phi-3 or Phi-4, mini ones included."""
    config.reject("attention_bias", False, why="its projections have no biases")
    config.reject("mlp_bias", False, why="its projections have no biases")
    config = config.with_default("rms_norm_eps", NORM_EPS)
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # the first names of longrope
        config = config.replaced(rope_scaling={**scaling, "rope_type": "longrope"})
    spec = llama(config.with_default("original_max_position_embeddings", ORIGINAL_POSITIONS), partial_rotary=1.0)
    window = config.size("sliding_window") if config.has("sliding_window") else None
    return replace(spec, weights=WEIGHTS).with_windows((window,) * spec.num_layers)
