"""Tables of embeddings: of floats, or as a checkpoint stores them."""

from typing import Protocol, runtime_checkable

from quire.kernels.tensors import Tensor


@runtime_checkable
class StoredTable(Protocol):
    """A table on a CPU in another form than floats, as a file has it: in less memory, and read sooner."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""


Table = Tensor | StoredTable  # [num_rows, width]
