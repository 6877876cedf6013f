"""StableLM: Llama with LayerNorm, partial rotary embeddings, in some models parallel sublayers (2024)."""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.families.llama import WEIGHTS, llama
from quire.model.spec import DecoderSpec

PARTIAL_ROTARY = 0.25


def stablelm(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a StableLM 3B, Zephyr, 2 1.6B or 2 12B."""
    config.reject("qk_layernorm", False, why="norms with other weights for each head are not computed")
    for key in ("attention_bias", "mlp_bias"):
        config.reject(key, False, why="biases are those of use_qkv_bias")
    is_parallel, has_bias = config.flag("use_parallel_residual", False), config.flag("use_qkv_bias", False)
    spec = llama(config, partial_rotary=PARTIAL_ROTARY)
    spec = spec.with_layers(partial(replace, has_qkv_bias=has_bias, is_parallel=is_parallel))
    weights = replace(WEIGHTS, feed_forward_norm=None) if is_parallel else WEIGHTS
    return replace(spec, norm="layer", norm_eps=config.number("layer_norm_eps", 1e-5), weights=weights)
