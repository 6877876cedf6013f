"""Language model protocol: all that the worker, memory profiling and the engine's assembly know of a model.

`Decoder` implements it for all model families; any object with these members is served as well.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.kernels.back_end import BackEnd
from quire.kernels.delta_net import StateRows
from quire.kernels.low_rank import RowAdapters
from quire.kernels.tensors import NUMPY_LIBRARY, DType, Library, Tensor
from quire.model.kv_cache import KVCache, KVGeometry


class Embeds(NamedTuple):
    """Rows of hidden states that replace the embeddings of tokens: those of images.

    `values` [num_rows, hidden_size], of the model's dtype; behind them what the first layers add, of as many columns
    each. `places`: the time, row and column that such a token is rotated by, [3, num_rows]; None: its position.
    """

    rows: NDArray[np.int64]  # [num_rows], places in the batch
    values: Tensor
    places: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of S sequences, sequences end to end; each sequence's tokens are the last ones of its context."""

    token_ids: Tensor      # [T] int64
    positions: Tensor      # [T] int64, of each token in its sequence
    slot_mapping: Tensor   # [T] int64, where its key and value are written; -1: nowhere, they are in the cache already
    query_starts: Tensor   # [S + 1] int32, where each sequence begins in the batch
    context_lens: Tensor   # [S] int32, tokens that a sequence's last query may attend to, itself included
    block_tables: Tensor   # [S, max_blocks] int32
    token_types: Tensor | None = field(default=None, kw_only=True)  # [T] int64, 1 in a pair's second text; None: all 0
    adapters: RowAdapters | None = field(default=None, kw_only=True)  # one per token; None: the model alone
    embeds: Embeds | None = field(default=None, kw_only=True)         # None: all are looked up
    seen_ends: Tensor | None = field(default=None, kw_only=True)      # as in AttentionMetadata
    state_rows: StateRows | None = field(default=None, kw_only=True)  # None: the model has no states
    hidden: Tensor | None = field(default=None, kw_only=True)  # for draft heads: [T, hidden_size] of the tokens before
    # [S]: hidden states are read of so many last tokens of each sequence, those of others may be anything; None: all
    num_read: NDArray[np.int64] | None = field(default=None, kw_only=True)

    def taken(self, library: Library) -> "ForwardBatch":
        """Return a batch of arrays as one of the library's tensors in host memory."""
        if library is NUMPY_LIBRARY:
            return self
        types, adapters = self.token_types, self.adapters
        return ForwardBatch(
            *map(library.tensor, self.tensors), token_types=None if types is None else library.tensor(types),
            adapters=None if adapters is None else adapters._replace(of_row=library.tensor(adapters.of_row)),
            embeds=self.embeds, seen_ends=None if self.seen_ends is None else library.tensor(self.seen_ends),
            state_rows=None if self.state_rows is None else self.state_rows.taken(library), hidden=self.hidden,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in the order of the fields, without the token types, the adapters and the embeds."""
        return [
            self.token_ids, self.positions, self.slot_mapping, self.query_starts, self.context_lens, self.block_tables
        ]  # fmt: skip


class LanguageModel(Protocol):
    """A model on its device: token ids, positions and cache tensors in, hidden states and logits out."""

    @property
    def vocab_size(self) -> int:
        """Token ids, and columns of the logits."""

    @property
    def dtype(self) -> DType:
        """Dtype of the weights and the activations, as the back end has it; the KV cache's is in the geometry."""

    @property
    def device(self) -> Any:  # noqa: ANN401 ("cpu", or a torch.device)
        """Device of the weights; the KV cache is on the same one."""

    @property
    def back_end(self) -> BackEnd:
        """Kernels of the model, of block copies and of sampling."""

    @property
    def kv_geometry(self) -> KVGeometry:
        """Keys and values that the model writes, layer by layer."""

    @property
    def progress(self) -> NDArray[np.int64]:
        """Count of layers and heads computed since start, [1]; any thread may read it."""

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def layer_flops(self) -> tuple[float, float]:
        """Floating-point operations of a layer: per token, and per pair of a token and one that it attends to."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a batch and write its keys and values; return hidden states [num_tokens, any width] for `logits`.

        `cache` has the layers of `kv_geometry`, and is the same object in every call of a worker.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of rows of hidden states."""
