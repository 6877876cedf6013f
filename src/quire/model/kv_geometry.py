"""KV geometry: heads, head size and dtype of the keys and values of each layer.

All that the KV cache, the swap space and memory sizing know of a model. Models that share block tables, such as a model
and its draft model, are joined into one geometry: its layers are those of all, in order. No torch.
"""

from dataclasses import dataclass

from quire.core.kv_dtypes import ELEMENT_BYTES, QUANTIZED, KVDtype
from quire.model.spec import DecoderSpec, widest_window


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: [num_heads, head_dim] each per token, `num_heads` being KV heads."""

    num_heads: int
    head_dim: int
    dtype: str                       # stored elements; a torch dtype's name
    scale_dtype: str | None = None   # one scale per token and head; None: no scales
    window: int | None = None        # tokens that a token sees, itself included; None: all

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys, and as many of its values."""
        scale_bytes = 0 if self.scale_dtype is None else ELEMENT_BYTES[self.scale_dtype]
        return self.num_heads * (self.head_dim * ELEMENT_BYTES[self.dtype] + scale_bytes)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Keys and values of a model, layer by layer."""

    layers: tuple[LayerKV, ...]

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str, scale_dtype: str | None = None) -> "KVGeometry":
        """Return the geometry of a model with cache elements of `dtype`, and scales if `scale_dtype` is not None.

        An encoder keeps nothing: its geometry has no layers.
        """
        kept = (each for each in spec.layers if each.is_causal)
        layers = (LayerKV(each.num_kv_heads, each.head_dim, dtype, scale_dtype, each.window) for each in kept)
        return cls(tuple(layers))

    def joined(self, *others: "KVGeometry") -> "KVGeometry":
        """Return the geometry of models that share block tables: the layers of this one, then those of the others."""
        return KVGeometry(sum((other.layers for other in others), self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * sum(layer.bytes_per_token for layer in self.layers)

    @property
    def quantized_dtype(self) -> str:
        """The name of --kv-cache-dtype by which layers are quantized, several in a list; empty if none is."""
        stored = {KVDtype(layer.dtype, layer.scale_dtype) for layer in self.layers}
        return ", ".join(name for name, each in QUANTIZED.items() if each in stored)

    @property
    def sliding_window(self) -> int | None:
        """The widest window, as in `widest_window`."""
        return widest_window([layer.window for layer in self.layers])

    def tensor_bytes(self, num_tokens: int) -> list[int]:
        """Return the bytes of each tensor of a cache of `num_tokens` tokens: keys of all layers, then their values."""
        return 2 * [num_tokens * layer.bytes_per_token for layer in self.layers]
