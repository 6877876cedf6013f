"""What a back end needs to know of a decoder's layers to run all of them in one call of its own.

`quire.model.layers` runs them of single ops, which is what every back end can do and what says what a layer means.
Where the time between two ops counts, a back end may take the parts and run the whole stack itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.kernels.linear import Linear
from quire.kernels.norm import Norm
from quire.kernels.paged_attention import AttentionMetadata


class LayerParts(NamedTuple):
    """One layer: attention, then feed-forward, each with a norm and a way past it."""

    attention_norm: Norm
    query_norm: Norm | None  # per head, as key_norm
    key_norm: Norm | None
    qkv: Linear
    cos_sin: Tensor | None        # as of `rotary_table`
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    out: Linear
    feed_forward_norm: Norm
    up: Linear                    # activated
    down: Linear


class LayerInputs(NamedTuple):
    """What every layer needs to know of the batch."""

    positions: Tensor      # [num_tokens] int64
    slot_mapping: Tensor   # [num_tokens] int64
    metadata: AttentionMetadata


class RunLayers(Protocol):
    """All layers in one call."""

    def __call__(
        self, x: Tensor, step: LayerInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return `(x, residual)`, each [num_tokens, width], whose sum is the stream after the last layer; no residual:
        x is the stream.

        x [num_tokens, width] is the stream before the first one, and is not to be used again; keys and values are the
        caches of each layer.
        """
