"""The parts that a decoder is composed of. Each is built from a spec and a reader of its weights, once.

Activations are flat: [num_tokens, width]. All arithmetic is the back end's.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.decoder_layers import LayerParts
from quire.kernels.norm import Norm
from quire.kernels.paged_attention import AttentionPlan
from quire.model.shapes import LayerShapes, NormShape
from quire.model.spec import DecoderSpec
from quire.model.weights import WeightReader


class Step(NamedTuple):
    """What every layer needs to know of the batch."""

    positions: Tensor      # [num_tokens] int64
    slot_mapping: Tensor   # [num_tokens] int64
    attention: AttentionPlan


def make_norm(spec: DecoderSpec, weights: WeightReader, shape: NormShape) -> Norm:
    """Return the family's norm over the last dimension, which first adds the residual stream if there is one."""
    make = weights.back_end.layer_norm if spec.norm == "layer" else weights.back_end.rms_norm
    return make(*weights.norm(shape), spec.norm_eps)


class Attention:
    """Causal self-attention over the paged cache: project, place, write, attend, project."""

    def __init__(self, spec: DecoderSpec, weights: WeightReader, layer: int, cos_sin: Tensor | None) -> None:
        shapes = LayerShapes.of(spec)
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_dim = spec.head_dim
        self.qkv = weights.linear(shapes.qkv)
        self.out = weights.linear(shapes.attention_out)
        self.query_norm = None if shapes.query_norm is None else make_norm(spec, weights, shapes.query_norm)
        self.key_norm = None if shapes.key_norm is None else make_norm(spec, weights, shapes.key_norm)
        self.cos_sin = cos_sin
        self.scale, self.window = spec.attention_scales[layer], spec.windows[layer]
        self._ops = weights.back_end

    def __call__(self, x: Tensor, step: Step, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Return what attention adds to x [num_tokens, hidden_size]; the tokens' keys and values go to the cache."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [num_tokens, all heads, head_dim]
        query, key, value = torch.split(heads, self.heads, dim=1)
        query = self._place(query, key, value, step, key_cache, value_cache)
        attended = self._ops.paged_attention(
            query, key_cache, value_cache, step.attention, self.scale, self.window
        )
        return self.out(attended.flatten(1))

    def _place(
        self, query: Tensor, key: Tensor, value: Tensor, step: Step, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Normalize per head and turn by position, where the family does so; write keys, values; return the query."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query)[0], self.key_norm(key)[0]
        if self.cos_sin is None:
            self._ops.write_kv(key, value, key_cache, value_cache, step.slot_mapping)
            return query
        return self._ops.rotate_and_write_kv(
            query, key, value, step.positions, self.cos_sin, key_cache, value_cache, step.slot_mapping
        )


class FeedForward:
    """Project up, activate, project down. Gated: gate and up are one projection, and the activation multiplies them."""

    def __init__(self, spec: DecoderSpec, weights: WeightReader) -> None:
        shapes = LayerShapes.of(spec)
        self.up, self.down = weights.linear(shapes.up), weights.linear(shapes.down)

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the feed-forward adds to x [num_tokens, hidden_size]."""
        return self.down(self.up(x))


@dataclass(frozen=True, slots=True)
class Layer(ABC):
    """One layer of a decoder: attention, then feed-forward, each with a norm and a way past it."""

    attention_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward

    @abstractmethod
    def __call__(
        self, x: Tensor, residual: Tensor | None, step: Step, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return `(x, residual)` for the next layer, each [num_tokens, hidden_size].

        The stream is x + residual; the sum is left to the norm that comes next, which adds and normalizes in one
        pass. No residual: x is the stream.
        """


class PreNormLayer(Layer):
    """Norm, attention, add; norm, feed-forward, add (Radford et al. 2019)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: Step, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Leave the last sum open."""
        normed, residual = self.attention_norm(x, residual)
        attended = self.attention(normed, step, key_cache, value_cache)
        normed, residual = self.feed_forward_norm(attended, residual)
        return self.feed_forward(normed), residual


    @property
    def parts(self) -> LayerParts:
        """The layer as `BackEnd.fuse_layers` takes it."""
        attention, feed_forward = self.attention, self.feed_forward
        num_heads, num_kv_heads, _ = attention.heads
        return LayerParts(
            attention_norm=self.attention_norm,
            query_norm=attention.query_norm,
            key_norm=attention.key_norm,
            qkv=attention.qkv,
            cos_sin=attention.cos_sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            window=attention.window,
            out=attention.out,
            feed_forward_norm=self.feed_forward_norm,
            up=feed_forward.up,
            down=feed_forward.down,
        )


class PostNormLayer(Layer):
    """Attention, add, norm; feed-forward, add, norm (Vaswani et al. 2017)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: Step, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Leave no sum open."""
        attended = self.attention(x, step, key_cache, value_cache)
        normed, _ = self.attention_norm(attended, x)
        normed, _ = self.feed_forward_norm(self.feed_forward(normed), normed)
        return normed, None
