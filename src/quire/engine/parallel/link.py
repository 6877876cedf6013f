"""Link between ranks within a step: commands of rank 0, tokens and hidden states, over their exchanges."""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.model.ranks import Ranks

FORWARD: Final = 0
LOGITS: Final = 1
END: Final = 2


class RankExchange(Ranks, Protocol):
    """A `Ranks` whose exchanges can be given up and begun again.

    After `interrupt` the current and all later exchanges of this rank raise InterruptedExchangeError, after `leave`
    those of all ranks. When no rank exchanges, rank 0 calls `resume`, lets the other ranks call `reset`, and calls it.
    """

    def broadcast(self, rows: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
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
        self._ranks.broadcast(torch.tensor([[kind, count]]), (1, 2), torch.int64)
        if rows is not None:
            self._ranks.broadcast(rows, rows.shape, rows.dtype)

    def receive(self) -> tuple[int, int]:
        """Wait for a command; return its kind, and the number of rows that `rows` is to be called for."""
        kind, count = self._ranks.broadcast(None, (1, 2), torch.int64)[0].tolist()
        return kind, count

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Wait for the rows of a command."""
        return self._ranks.broadcast(None, (num_rows, width), dtype)
