"""Keys and values of the texts of one step, for models that keep none.

An encoder computes a text as a whole: its keys and values are read in the layer that writes them and never again, so
one layer's tensors serve all layers, one after the other. Blocks are numbered anew in each step, and no request owns
one.
"""

from dataclasses import replace

import torch

from quire.kernels.back_end import BackEnd
from quire.model.batch import ForwardBatch
from quire.model.kv_cache import KVCache
from quire.model.kv_geometry import KVGeometry, LayerKV
from quire.model.spec import DecoderSpec

BLOCK_SIZE = 32  # tokens: texts are short, and the rest of a text's last block is not touched


class TextCache:
    """Memory that grows to the largest step: its tokens, and less than BLOCK_SIZE more for each text."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, back_end: BackEnd) -> None:
        stored = back_end.cache_layout.stored_dtype(dtype, "auto")
        self._geometry = KVGeometry((LayerKV(spec.num_kv_heads, spec.head_dim, *stored),))
        self._num_layers, self._back_end = spec.num_layers, back_end
        self._num_blocks, self._cache = 0, KVCache([], [], BLOCK_SIZE)

    def place(self, batch: ForwardBatch) -> tuple[ForwardBatch, KVCache]:
        """Return the batch with places for its texts, and the cache that has them. Each text is there as a whole."""
        lengths = batch.query_starts.diff().long()
        assert torch.equal(lengths, batch.context_lens.long()), "a part of a text"
        num_blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        first_blocks = num_blocks.cumsum(0) - num_blocks
        self._grow(int(num_blocks.sum()))
        columns = torch.arange(int(num_blocks.max()))
        tables = (first_blocks[:, None] + columns).int()        # past a text's blocks they are not followed
        slots = (first_blocks * BLOCK_SIZE).repeat_interleave(lengths) + batch.positions
        return replace(batch, slot_mapping=slots, block_tables=tables), self._cache

    def _grow(self, num_blocks: int) -> None:
        if num_blocks <= self._num_blocks:
            return
        self._num_blocks = 1 << (num_blocks - 1).bit_length()
        own = KVCache.allocate(self._geometry, self._num_blocks, BLOCK_SIZE, self._back_end)
        self._cache = KVCache(own.keys * self._num_layers, own.values * self._num_layers, BLOCK_SIZE)
