"""MTP head: a layer of a checkpoint that predicts the token behind the next one (DeepSeek-AI 2024, V3, section 2.2).

It reads a token's embedding and the target's hidden state of the token before, each normalized, and projects both to
one hidden state for its layer. The normed output gives logits by the target's head, and is the hidden state that the
next of several drafts reads. Of several such layers in a checkpoint the first is used: no other one reads the target.

No other layer reads the output of a token that nothing is drafted behind. The layer is therefore two programs: up to
the write of keys and values for all tokens of a step, and the rest for those with drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.back_end import BackEnd, require_ops
from quire.kernels.layers import Linear
from quire.kernels.linear_weight import StoredTable
from quire.kernels.program import (
    INPUT,
    Activations,
    LayerInputs,
    LinearOp,
    Program,
    RotaryWriteOp,
    live_after,
    run_ops,
)
from quire.kernels.tensors import DType, Tensor, concatenated_columns, take_rows
from quire.model.config import num_layer_weights
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import build_program, make_norm
from quire.model.shapes import MtpShapes
from quire.model.spec import Rotary
from quire.model.weights import WeightReader


@dataclass(frozen=True, slots=True)
class KeepOp:
    """kept = the activations that it reads, by name: the result of the first part of a divided program."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ("kept",)

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Keep the activations; nothing is computed."""
        activations["kept"] = {name: activations[name] for name in self.reads}


class DividedLayer(NamedTuple):
    """A layer in two programs; `first` writes its keys and values, and returns what `rest` reads, by name."""

    first: Program
    rest: Program

    @classmethod
    def of(cls, program: Program) -> "DividedLayer":
        """Divide the program of one layer."""
        ops, result = program.ops, program.result
        last = next(place for place, op in enumerate(ops) if isinstance(op, RotaryWriteOp))
        kept = KeepOp("kept", tuple(sorted(live_after(ops, result)[last])))
        return cls(Program((*ops[: last + 1], kept), "kept"), Program(ops[last + 1 :], result))


class MtpHead:
    """The MTP head of a target on CPUs, with the embeddings, rotary tables and layer to logits of that target.

    `weights`: a reader of the target's checkpoint that reads nothing else. `ranks_logits`: of a target that is rank 0's
    part of a model, the logits of all ranks; its layer is whole, and is computed by rank 0 alone.
    """

    def __init__(
        self, target: Decoder, weights: WeightReader, kv_cache_dtype: str,
        ranks_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        assert target.spec.mtp is not None, "a model without an MTP head"
        self.has_ranks, self.logits = ranks_logits is not None, ranks_logits or target.logits
        self.spec = target.spec.mtp
        self._target, names = target, self.spec.weights
        assert names.mtp_projection is not None
        weights = weights.below(names.prefixes, names.mtp_projection, names, is_vision=False)
        shapes, layout = MtpShapes.of(self.spec), self.back_end.cache_layout
        self._embedding_norm = make_norm(self.spec, weights, shapes.embedding_norm)
        self._hidden_norm = make_norm(self.spec, weights, shapes.hidden_norm)
        self._project = weights.linear(shapes.projection)
        program = build_program(self.spec, weights, replace(target.shared, ranks=None))
        require_ops(self.back_end.name, program.ops)
        divided = DividedLayer.of(program)
        linears = (op.linear for op in divided.first.ops if isinstance(op, LinearOp))
        self._first_bytes = self._project.num_bytes + sum(linear.num_bytes for linear in linears)
        self._layer = DividedLayer(*map(self.back_end.fuse, divided))
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
    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of weights that a pass of one token reads, and the part of them that is read for a draft alone.

        Of experts they are those that a token uses; the target's layer to logits is among them.
        """
        width = self.spec.hidden_size
        num_read = min(num_layer_weights(self.spec) + 2 * width * width, self.num_parameters)
        num_bytes = self.weight_bytes * num_read // self.num_parameters + self._target.head_bytes
        return num_bytes, num_bytes - self._first_bytes

    @property
    def kept_weights(self) -> list[Linear | StoredTable | Array]:
        """As in `Decoder`, of the head's own weights."""
        return self._tally.kept

    @property
    def frequencies(self) -> dict[Rotary, Array]:
        """As in `Decoder`."""
        return self._target.frequencies

    def forward(self, batch: ForwardBatch, cache: KVCache, sequences: NDArray[np.int64]) -> Tensor:
        """Return the normed output [num, hidden_size] of the last tokens of some sequences of a batch, int64 [num].

        The batch has `hidden`. Keys and values of each token are written to its own slot, so they depend on the tokens
        up to it alone.
        """
        assert batch.hidden is not None, "an MTP head without hidden states of its target"
        inputs = self._target.layer_inputs(batch, cache)
        embedded = self._target.embedding(batch.token_ids, batch.positions)
        both = concatenated_columns([self._embedding_norm(embedded)[0], self._hidden_norm(batch.hidden)[0]])
        kept = self._layer.first.run(self._project(both), inputs)
        if len(sequences) < len(batch.token_ids):
            rows = np.asarray(batch.query_starts)[sequences + 1].astype(np.int64) - 1
            kept = {name: take_rows(activation, rows) for name, activation in kept.items()}
            inputs = self._target.layer_inputs(self._last_tokens(batch, sequences, rows), cache)
        if not len(sequences):
            return kept[INPUT]
        run_ops(self._layer.rest.ops, self._layer.rest.dead, kept, inputs)
        return kept[self._layer.rest.result]

    def _last_tokens(
        self, batch: ForwardBatch, sequences: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> ForwardBatch:
        """Return the batch of the tokens in `rows`, the last ones of `sequences`."""
        return ForwardBatch(
            batch.token_ids[rows], batch.positions[rows], batch.slot_mapping[rows],
            self.back_end.library.tensor(np.arange(len(rows) + 1, dtype=np.int32)),
            batch.context_lens[sequences], batch.block_tables[sequences],
        )  # fmt: skip
