"""Draft head: a layer, or some, that predicts tokens behind the next one from hidden states of its target.

It reads a token's embedding and what the target has computed for the token before. MTP heads are in checkpoints of
their targets, EAGLE-3 heads in folders of their own.

No other layer reads the output of a token that nothing is drafted behind, so what follows the last write of keys and
values runs for the others alone (`quire.kernels.read_rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.back_end import BackEnd, require_ops
from quire.kernels.layers import Linear
from quire.kernels.linear_weight import StoredTable
from quire.kernels.program import NO_OTHERS, LinearOp
from quire.kernels.read_rows import ReadRows, of_read_rows
from quire.kernels.tensors import DType, Tensor
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import ProgramInputs, build_program
from quire.model.spec import DecoderSpec, Rotary
from quire.model.weights import WeightReader


class DraftHead(ABC):
    """A head of a target on CPUs. `weights`: a reader that reads nothing else."""

    has_ranks = False  # other ranks compute a part of its logits

    def __init__(
        self, target: Decoder, spec: DecoderSpec, weights: WeightReader, shared: ProgramInputs, kv_cache_dtype: str
    ) -> None:
        self.spec, self._target, self._tally, layout = spec, target, weights.tally, target.back_end.cache_layout
        program = build_program(spec, weights, shared)
        require_ops(self.back_end.name, program.ops)
        of_read = of_read_rows(program)
        assert of_read is not None, "a head without keys and values"
        self._first_bytes = sum(op.linear.num_bytes for op in of_read.ops if isinstance(op, LinearOp))
        self._whole, self._of_read_rows = map(self.back_end.fuse, (program, of_read))
        self.kv_geometry = KVGeometry.of(
            spec, *layout.stored_dtype(self.dtype, kv_cache_dtype),
            tail_dtype=layout.stored_dtype(self.dtype).element,
        )  # fmt: skip

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
    @abstractmethod
    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of weights that a pass of one token reads, and the part of them that is read for a draft alone."""

    @property
    def kept_weights(self) -> list[Linear | StoredTable | Array]:
        """As in `Decoder`, of the head's own weights."""
        return self._tally.kept

    @property
    @abstractmethod
    def frequencies(self) -> dict[Rotary, Array]:
        """As in `Decoder`."""

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """Return what the head reads of tokens [num_tokens, hidden_size], from what the target's `forward` returned."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: KVCache, sequences: NDArray[np.int64]) -> Tensor:
        """Return the output [num, hidden_size] of the last tokens of some sequences of a batch, int64 [num].

        It is what `logits` and the next of several drafts read. The batch has `hidden`. Keys and values of each token
        are written to its own slot, so they depend on the tokens up to it alone.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size]; as defined as `Decoder.logits`."""

    def _run(
        self, x: Tensor, batch: ForwardBatch, cache: KVCache, sequences: NDArray[np.int64],
        others: Mapping[str, Tensor] = NO_OTHERS,
    ) -> Tensor:  # fmt: skip
        """Run the layers on x [num_tokens, hidden_size], and others that they read; return as `forward` does."""
        inputs = self._target.layer_inputs(batch, cache)
        if len(sequences) == len(batch.token_ids):
            return self._whole.run(x, inputs, others)
        rows = np.asarray(batch.query_starts)[sequences + 1].astype(np.int64) - 1
        starts = self.back_end.library.tensor(np.arange(len(rows) + 1, dtype=np.int32))
        return self._of_read_rows.run(x, replace(inputs, read_rows=ReadRows(rows, sequences, starts)), others)
