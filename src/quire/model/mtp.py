"""MTP head: a layer of a checkpoint that predicts the token behind the next one (DeepSeek-AI 2024, V3, section 2.2).

It reads a token's embedding and the target's hidden state of the token before, each normalized, and projects both to
one hidden state for its layer. The normed output gives logits by the target's head, and is the hidden state that the
next of several drafts reads. Of several such layers in a checkpoint the first is used: no other one reads the target.
"""

from typing import Any

from quire.core.arrays import Array
from quire.kernels.back_end import BackEnd, require_ops
from quire.kernels.layers import Linear
from quire.kernels.linear_weight import StoredTable
from quire.kernels.tensors import DType, Tensor, concatenated_columns
from quire.model.config import num_layer_weights
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import build_program, make_norm
from quire.model.shapes import MtpShapes
from quire.model.spec import Rotary
from quire.model.weights import WeightReader


class MtpHead:
    """The MTP head of a target on one CPU, with the embeddings, rotary tables and layer to logits of that target.

    `weights`: a reader of the target's checkpoint that reads nothing else.
    """

    def __init__(self, target: Decoder, weights: WeightReader, kv_cache_dtype: str) -> None:
        assert target.spec.mtp is not None, "a model without an MTP head"
        self.spec = target.spec.mtp
        self._target, names = target, self.spec.weights
        assert names.mtp_projection is not None
        weights = weights.below(names.prefixes, names.mtp_projection, names, is_vision=False)
        shapes, layout = MtpShapes.of(self.spec), self.back_end.cache_layout
        self._embedding_norm = make_norm(self.spec, weights, shapes.embedding_norm)
        self._hidden_norm = make_norm(self.spec, weights, shapes.hidden_norm)
        self._project = weights.linear(shapes.projection)
        program = build_program(self.spec, weights, target.shared)
        require_ops(self.back_end.name, program.ops)
        self._program = self.back_end.fuse(program)
        self.kv_geometry = KVGeometry.of(
            self.spec, *layout.stored_dtype(self.dtype, kv_cache_dtype),
            tail_dtype=layout.stored_dtype(self.dtype).element,
        )  # fmt: skip
        self._tally = weights.tally

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""
        return self._target.vocab_size

    @property
    def dtype(self) -> DType:
        """Dtype of the target's hidden states, and of the head's."""
        return self._target.dtype

    @property
    def device(self) -> Any:  # noqa: ANN401 (as in LanguageModel)
        """Device of the target."""
        return self._target.device

    @property
    def back_end(self) -> BackEnd:
        """Kernels of the target."""
        return self._target.back_end

    @property
    def num_parameters(self) -> int:
        """Parameters of the head alone."""
        return self._tally.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights in memory."""
        return self._tally.weight_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of the head's own weights that one token reads: of experts, those that it uses."""
        width = self.spec.hidden_size
        num_read = min(num_layer_weights(self.spec) + 2 * width * width, self.num_parameters)
        return self.weight_bytes * num_read // self.num_parameters

    @property
    def logits_bytes(self) -> int:
        """Bytes of the target's layer to logits."""
        return self._target.head_bytes

    @property
    def kept_weights(self) -> list[Linear | StoredTable | Array]:
        """As in `Decoder`, of the head's own weights."""
        return self._tally.kept

    @property
    def frequencies(self) -> dict[Rotary, Array]:
        """As in `Decoder`."""
        return self._target.frequencies

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return the normed output [num_tokens, hidden_size] for the tokens and `hidden` of a batch.

        Keys and values of a token are written to its own slot, so they depend on the tokens up to it alone.
        """
        assert batch.hidden is not None, "an MTP head without hidden states of its target"
        inputs = self._target.layer_inputs(batch, cache)
        embedded = self._target.embedding(batch.token_ids, batch.positions)
        both = concatenated_columns([self._embedding_norm(embedded)[0], self._hidden_norm(batch.hidden)[0]])
        return self._program.run(self._project(both), inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] by the target's head; as defined as `Decoder.logits`."""
        return self._target.logits(hidden)
