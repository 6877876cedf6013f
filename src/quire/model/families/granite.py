"""Granite: Llama with multipliers on embeddings, attention scores, residuals and logits (Granite Team 2024)."""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import llama
from quire.model.spec import DecoderSpec


def granite(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Granite without experts."""
    scale, residual = config.number("attention_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    spec = llama(config).with_layers(partial(replace, attention_scale=scale, residual_multiplier=residual))
    embedding, logit = config.number("embedding_multiplier", 1.0), 1 / config.number("logits_scaling", 1.0)
    return replace(spec, embedding_multiplier=embedding, logit_multiplier=logit)
