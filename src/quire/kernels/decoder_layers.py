"""What a back end needs to know of a decoder's layers to run all of them in one call of its own.

`quire.model.layers` composes a layer of single ops, which is what every back end can run and what says what a layer
means. Where the time between two ops counts, a back end may take the parts and run the whole stack itself.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.kernels.linear import Linear
from quire.kernels.norm import Norm
from quire.kernels.paged_attention import AttentionPlan


class LayerParts(NamedTuple):
    """One layer: norm, attention, add; norm, feed-forward, add."""

    attention_norm: Norm
    query_norm: Norm | None  # per head, as key_norm
    key_norm: Norm | None
    qkv: Linear
    cos_sin: Tensor | None        # as in rotary.py
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    out: Linear
    feed_forward_norm: Norm
    up: Linear                    # activated
    down: Linear


class RunLayers(Protocol):
    """All layers in one call."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: AttentionPlan,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return `(x, residual)`, each [num_tokens, width], whose sum is the stream after the last layer.

        x [num_tokens, width] is the stream before the first one, and is not to be used again; positions and
        slot_mapping [num_tokens] int64; keys and values are the caches of each layer.
        """
