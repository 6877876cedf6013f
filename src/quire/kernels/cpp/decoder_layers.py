"""All layers of a decoder in one call of the extension; csrc/decoder_layers.hpp says why."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.attention import metadata_arguments
from quire.kernels.cpp.cache_layout import check_caches
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.cpp.linear import CppLinear
from quire.kernels.cpp.norm import CppNorm
from quire.kernels.decoder_layers import LayerInputs, LayerParts, RunLayers
from quire.kernels.linear import Linear
from quire.kernels.norm import Norm

_LAYERS = pair("DecoderLayers")


def fuse_layers(layers: Sequence[LayerParts], progress: Tensor) -> RunLayers | None:
    """Return layers that run as one; None for dtypes that the kernels serve by conversion only."""
    first = layers[0].attention_norm
    assert isinstance(first, CppNorm)
    return CppLayers(layers, first, progress) if kernel_dtype(first.dtype) == first.dtype else None


class CppLayers:
    """A `RunLayers`. Keeps the parts, whose memory the extension reads."""

    def __init__(self, layers: Sequence[LayerParts], norm: CppNorm, progress: Tensor) -> None:
        first = layers[0]
        self._parts, self._progress = layers, progress
        self._width, self._dtype = norm.width, norm.dtype
        self._num_kv_heads, self._head_dim = first.num_kv_heads, first.head_dim
        sizes = (self._width, first.num_heads, first.num_kv_heads, first.head_dim)
        self._layers = _LAYERS[self._dtype]([_layer_weights(layer) for layer in layers], *sizes)
        self._keys: Sequence[Tensor] | None = None  # the caches that the extension has the addresses of

    def __call__(
        self, x: Tensor, step: LayerInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run one step; as `RunLayers` says."""
        positions, slot_mapping, metadata = step
        if keys is not self._keys:
            self._use_caches(keys, values, metadata.block_size)
        num_tokens = len(x)
        assert x.shape == (num_tokens, self._width), f"{tuple(x.shape)} for layers of width {self._width}"
        assert x.dtype == self._dtype, f"{x.dtype} for layers of {self._dtype}"
        assert x.is_contiguous(), "hidden states with gaps"
        assert num_tokens == len(positions) == len(slot_mapping) == metadata.num_tokens
        assert positions.dtype == slot_mapping.dtype == torch.int64
        assert positions.is_contiguous(), "positions with gaps"
        assert slot_mapping.is_contiguous(), "slots with gaps"
        residual = torch.empty_like(x)
        self._layers.run(
            x.data_ptr(), residual.data_ptr(), num_tokens, positions.data_ptr(), slot_mapping.data_ptr(),
            *metadata_arguments(metadata), self._progress.data_ptr(),
        )  # fmt: skip
        return x, residual

    def _use_caches(self, keys: Sequence[Tensor], values: Sequence[Tensor], block_size: int) -> None:
        assert len(keys) == len(values) == len(self._parts), f"{len(keys)} caches for {len(self._parts)} layers"
        for key, value in zip(keys, values, strict=True):
            check_caches(key, value, self._num_kv_heads, block_size, self._head_dim, self._dtype)
        self._layers.use_caches([key.data_ptr() for key in keys], [value.data_ptr() for value in values], block_size)
        self._keys = keys


def _layer_weights(layer: LayerParts) -> _kernels.LayerWeights:
    cos_sin = layer.cos_sin
    assert cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous())
    return _kernels.LayerWeights(
        _norm_weights(layer.attention_norm),
        _norm_weights(layer.feed_forward_norm),
        _norm_weights(layer.query_norm),
        _norm_weights(layer.key_norm),
        _linear_weights(layer.qkv),
        _linear_weights(layer.out),
        _linear_weights(layer.up),
        _linear_weights(layer.down),
        address(cos_sin),
        0 if cos_sin is None else cos_sin.shape[1],
        layer.scale,
        layer.window or 0,
    )


def _norm_weights(norm: Norm | None) -> _kernels.NormWeights:
    if norm is None:
        return _kernels.NormWeights(0, 0, 0.0, False)
    assert isinstance(norm, CppNorm), f"{type(norm).__name__} among layers of the extension"
    return norm.weights


def _linear_weights(layer: Linear) -> _kernels.LinearWeights:
    assert isinstance(layer, CppLinear), f"{type(layer).__name__} among layers of the extension"
    return layer.weights
