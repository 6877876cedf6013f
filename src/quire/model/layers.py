"""The layers of a decoder: their parts, built from a spec and a reader of weights, and what a layer does with them.

Activations are flat: [num_tokens, width]. All arithmetic is the back end's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.back_end import BackEnd
from quire.kernels.decoder_layers import LayerInputs, LayerParts
from quire.kernels.norm import Norm
from quire.model.shapes import LayerShapes, NormShape
from quire.model.spec import DecoderSpec, NormPosition
from quire.model.weights import WeightReader


def make_norm(spec: DecoderSpec, weights: WeightReader, shape: NormShape) -> Norm:
    """Return the family's norm over the last dimension, which first adds the residual stream if there is one."""
    return weights.back_end.norm(*weights.norm(shape), spec.norm_eps, spec.norm == "layer")


def make_layer(spec: DecoderSpec, weights: WeightReader, layer: int, cos_sin: Tensor | None) -> LayerParts:
    """Read one layer; `cos_sin` is the table of positions that layers share, None for learned positions."""
    shapes = LayerShapes.of(spec)
    return LayerParts(
        attention_norm=make_norm(spec, weights, shapes.attention_norm),
        query_norm=None if shapes.query_norm is None else make_norm(spec, weights, shapes.query_norm),
        key_norm=None if shapes.key_norm is None else make_norm(spec, weights, shapes.key_norm),
        qkv=weights.linear(shapes.qkv),
        cos_sin=cos_sin,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scales[layer],
        window=spec.windows[layer],
        out=weights.linear(shapes.attention_out),
        feed_forward_norm=make_norm(spec, weights, shapes.feed_forward_norm),
        up=weights.linear(shapes.up),
        down=weights.linear(shapes.down),
    )


class ComposedLayers:
    """Layers run one after the other, of the back end's single ops."""

    def __init__(
        self, layers: Sequence[LayerParts], ops: BackEnd, norm_position: NormPosition, progress: Tensor
    ) -> None:
        self._layers, self._ops, self._progress = layers, ops, progress
        self._run = self._pre_norm if norm_position == "pre" else self._post_norm

    def __call__(
        self, x: Tensor, step: LayerInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Run all of them; as `RunLayers` says."""
        residual = None
        for layer, key_cache, value_cache in zip(self._layers, keys, values, strict=True):
            x, residual = self._run(layer, x, residual, step, key_cache, value_cache)
            self._progress += 1
        return x, residual

    def _pre_norm(
        self, layer: LayerParts, x: Tensor, residual: Tensor | None, step: LayerInputs, key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Norm, attention, add; norm, feed-forward, add (Radford et al. 2019). The last sum is left to the norm that
        comes next, which adds and normalizes in one pass.
        """
        normed, residual = layer.attention_norm(x, residual)
        attended = self._attend(layer, normed, step, key_cache, value_cache)
        normed, residual = layer.feed_forward_norm(attended, residual)
        return layer.down(layer.up(normed)), residual

    def _post_norm(
        self, layer: LayerParts, x: Tensor, residual: Tensor | None, step: LayerInputs, key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, add, norm; feed-forward, add, norm (Vaswani et al. 2017)."""
        attended = self._attend(layer, x, step, key_cache, value_cache)
        normed, _ = layer.attention_norm(attended, x)
        return layer.feed_forward_norm(layer.down(layer.up(normed)), normed)[0], None

    def _attend(
        self, layer: LayerParts, x: Tensor, step: LayerInputs, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Project, normalize per head, turn by position, write keys and values, attend to the cache, project."""
        heads = layer.qkv(x).view(len(x), -1, layer.head_dim)  # [num_tokens, all heads, head_dim]
        query, key, value = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query)[0], layer.key_norm(key)[0]
        query = self._ops.write_kv(
            query, key, value, step.positions, layer.cos_sin, key_cache, value_cache, step.slot_mapping
        )
        attended = self._ops.paged_attention(query, key_cache, value_cache, step.metadata, layer.scale, layer.window)
        return layer.out(attended.flatten(1))
