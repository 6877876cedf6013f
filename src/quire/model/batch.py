"""ForwardBatch: one step's tokens, flat, prefills and decodes side by side."""

from dataclasses import dataclass, field

from torch import Tensor

from quire.kernels.low_rank import RowAdapters


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
    adapters: RowAdapters | None = field(default=None, kw_only=True)  # of the T tokens; None: the model alone

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in the order of the fields, without the token types and the adapters."""
        return [
            self.token_ids, self.positions, self.slot_mapping, self.query_starts, self.context_lens, self.block_tables
        ]  # fmt: skip
