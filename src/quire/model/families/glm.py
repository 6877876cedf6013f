"""GLM-4 (0414): Llama with norms around sublayers and rotary embeddings of half of each head, interleaved (2025)."""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import DecoderSpec, interleaved

HEAD_DIM = 128
NORM_EPS = 1.5625e-7
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    feed_forward_in=("mlp.gate_up_proj",),
    attention_output_norm="post_self_attn_layernorm",
    feed_forward_output_norm="post_mlp_layernorm",
)


def glm4(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GLM-4."""
    config.reject("mlp_bias", False, why="its feed-forward has no biases")
    defaults = {"head_dim": HEAD_DIM, "attention_bias": True, "rms_norm_eps": NORM_EPS, "num_key_value_heads": 2}
    for key, default in defaults.items():
        config = config.with_default(key, default)
    spec = llama(config, partial_rotary=0.5)
    spec = spec.with_layers(partial(replace, norm_position="around", has_attention_out_bias=False))
    return interleaved(replace(spec, weights=WEIGHTS))
