"""StableLM: Llama with LayerNorm, partial rotary embeddings, in some models parallel sublayers (2024)."""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS, llama
from quire.model.spec import DecoderSpec

PARTIAL_ROTARY = 0.25
NORMS = "self_attn.{}_layernorm.norms.{{head}}"


def stablelm(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a StableLM 3B, Zephyr, 2 1.6B or 2 12B."""
    for key in ("attention_bias", "mlp_bias"):
        config.reject(key, False, why="biases are those of use_qkv_bias")
    is_parallel, has_bias = config.flag("use_parallel_residual", False), config.flag("use_qkv_bias", False)
    spec = llama(config, partial_rotary=PARTIAL_ROTARY)
    spec = spec.with_layers(partial(replace, has_qkv_bias=has_bias, is_parallel=is_parallel))
    if config.flag("qk_layernorm", False):
        spec = spec.with_layers(partial(replace, has_query_key_norm=True, is_query_key_norm_by_head=True))
    weights = replace(WEIGHTS, query_norm=NORMS.format("q"), key_norm=NORMS.format("k"))
    weights = replace(weights, feed_forward_norm=None) if is_parallel else weights
    return replace(spec, norm="layer", norm_eps=config.number("layer_norm_eps", 1e-5), weights=weights)
