"""MTP head: a layer of a checkpoint that predicts the token behind the next one (DeepSeek-AI 2024, V3, section 2.2).

It reads a token's embedding and the target's hidden state of the token before, each normalized, and projects both to
one hidden state for its layer. The normed output gives logits by the target's head, and is the hidden state that the
next of several drafts reads. Of several such layers in a checkpoint the first is used: no other one reads the target.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.tensors import Tensor, concatenated_columns
from quire.model.config import num_layer_weights
from quire.model.decoder import Decoder
from quire.model.draft_head import DraftHead
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import make_norm
from quire.model.shapes import MtpShapes
from quire.model.spec import Rotary
from quire.model.weights import WeightReader


class MtpHead(DraftHead):
    """The MTP head of a target, with the embeddings, rotary tables and layer to logits of that target.

    `weights`: a reader of the target's checkpoint that reads nothing else. `ranks_logits`: of a target that is rank 0's
    part of a model, the logits of all ranks; its layer is whole, and is computed by rank 0 alone.
    """

    def __init__(
        self, target: Decoder, weights: WeightReader, kv_cache_dtype: str,
        ranks_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        assert target.spec.mtp is not None, "a model without an MTP head"
        self.has_ranks, self._logits = ranks_logits is not None, ranks_logits or target.logits
        spec = target.spec.mtp
        names, shapes = spec.weights, MtpShapes.of(spec)
        assert names.mtp_projection is not None
        weights = weights.below(names.prefixes, names.mtp_projection, names, is_vision=False)
        self._embedding_norm = make_norm(spec, weights, shapes.embedding_norm)
        self._hidden_norm = make_norm(spec, weights, shapes.hidden_norm)
        self._project = weights.linear(shapes.projection)
        super().__init__(target, spec, weights, replace(target.shared, ranks=None), kv_cache_dtype)

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of weights that a pass of one token reads, and the part of them that is read for a draft alone.

        Of experts they are those that a token uses; the target's layer to logits is among them.
        """
        width = self.spec.hidden_size
        num_read = min(num_layer_weights(self.spec) + 2 * width * width, self.num_parameters)
        num_bytes = self.weight_bytes * num_read // self.num_parameters + self._target.head_bytes
        return num_bytes, num_bytes - self._project.num_bytes - self._first_bytes

    @property
    def frequencies(self) -> dict[Rotary, Array]:
        """As in `Decoder`: the target's."""
        return self._target.frequencies

    def states(self, hidden: Tensor) -> Tensor:
        """Return the target's hidden states as they are."""
        return hidden

    def forward(self, batch: ForwardBatch, cache: KVCache, sequences: NDArray[np.int64]) -> Tensor:
        """Return the normed output."""
        assert batch.hidden is not None, "an MTP head without hidden states of its target"
        embedded = self._target.embedding(batch.token_ids, batch.positions)
        both = concatenated_columns([self._embedding_norm(embedded)[0], self._hidden_norm(batch.hidden)[0]])
        return self._run(self._project(both), batch, cache, sequences)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits by the target's head."""
        return self._logits(hidden)
