"""Exchanges between ranks: the protocol, the commands of rank 0 within a step, and a head in parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np

from quire.core.arrays import INT64
from quire.kernels.layers import Linear
from quire.kernels.tensors import DType, Tensor
from quire.model.config import num_parameters
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.sharding import Cut, Ranks

FORWARD: Final = 0
LOGITS: Final = 1
END: Final = 2


class RankExchange(Ranks, Protocol):
    """A `Ranks` with exchanges that can be given up and begun again.

    After `interrupt` the current and all later exchanges of this rank raise InterruptedExchangeError, on GPUs
    InterruptedCollectiveError, after `leave` those of all ranks. When no rank exchanges, rank 0 calls `resume`, lets
    the other ranks call `reset`, and calls it.
    """

    def broadcast(self, rows: Tensor | None, shape: Sequence[int], dtype: DType) -> Tensor:
        """Return rows [num_rows, width] of rank 0, which passes them, on every rank; others know shape and dtype."""

    def interrupt(self) -> None:
        """Give up; any thread may call it."""

    def leave(self) -> None:
        """Give up on all ranks; called by the thread that exchanges."""

    def resume(self) -> None:
        """Let exchanges begin again."""

    def reset(self) -> None:
        """Begin again."""

    def close(self) -> None:
        """Free what the exchanges hold. Idempotent."""


class Link:
    """Broadcasts from rank 0. Every call of it there is one call on each other rank."""

    def __init__(self, ranks: RankExchange) -> None:
        self._ranks = ranks

    def send(self, kind: int, rows: Tensor | None = None) -> None:
        """Send a command, with rows [num_rows, width] of any dtype."""
        count = 0 if rows is None else len(rows)
        self._ranks.broadcast(np.array([[kind, count]]), (1, 2), INT64)
        if rows is not None:
            self._ranks.broadcast(rows, rows.shape, rows.dtype)

    @contextmanager
    def computing(self, kind: int, rows: Tensor) -> Iterator[None]:
        """Send a command, and compute here what the other ranks compute then."""
        self.send(kind, rows)
        yield

    def receive(self) -> tuple[int, int]:
        """Wait for a command; return its kind, and the number of rows that `rows` is to be called for."""
        kind, count = self._ranks.broadcast(None, (1, 2), INT64)[0].tolist()
        return kind, count

    def rows(self, num_rows: int, width: int, dtype: DType) -> Tensor:
        """Wait for the rows of a command."""
        return self._ranks.broadcast(None, (num_rows, width), dtype)


class RankedModel:
    """The `LanguageModel` of all ranks: rank 0's, with which the others compute along."""

    def __init__(self, model: Decoder, link: Link, weight_bytes: int) -> None:
        self.own, self._link = model, link
        self.vocab_size, self.dtype, self.device = model.vocab_size, model.dtype, model.device
        self.back_end, self.kv_geometry, self.progress = model.back_end, model.kv_geometry, model.progress
        self.layer_flops, self.spec, self.vision = model.layer_flops, model.spec, model.vision
        self.num_parameters, self.weight_bytes = num_parameters(model.spec), weight_bytes

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a batch on all ranks; return hidden states [num_tokens, hidden_size]."""
        with self._link.computing(FORWARD, batch.token_ids[:, None]):
            return self.own.forward(batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size], until the next call."""
        hidden = self.own.untapped(hidden)
        with self._link.computing(LOGITS, hidden):
            return self.own.logits(hidden)


class GatheredHead:
    """A head that is split by the vocabulary: rank 0 gets the logits of all, by a collective.

    `gather` returns [num_rows, width] of all ranks' columns on rank 0, of other ranks nothing: [0, width].
    """

    def __init__(self, gather: Callable[[Tensor, Cut], Tensor], head: Linear, cut: Cut) -> None:
        self._gather, self._head, self._cut = gather, head, cut
        self.num_bytes = head.num_bytes

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Return [num_rows, vocab_size] on rank 0, of other ranks nothing: [0, vocab_size]."""
        assert addend is None, "an addend of a head that is split"
        return self._gather(self._head(x), self._cut)
