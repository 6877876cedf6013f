"""Ranks protocol: all that a decoder knows of tensor parallelism: its shard, and the exchanges between ranks."""

from typing import Protocol

from quire.kernels.gather import GatherHook, SumHook
from quire.kernels.linear import Linear
from quire.model.sharding import Cut, Shard


class Ranks(Protocol):
    """A rank among others. Each of them calls the same exchanges in the same order, with the same number of rows."""

    @property
    def shard(self) -> Shard:
        """This rank's part of the model."""

    def gather(self, cut: Cut) -> GatherHook:
        """Return the exchange of an activation that is divided like this."""

    def sum(self, width: int) -> SumHook:
        """Return the exchange of partial sums of an activation of this width."""

    def joined_head(self, head: Linear, cut: Cut) -> Linear:
        """Return the head of all ranks from this one's, which has its columns of the vocabulary.

        Its result, float32 [num_rows, vocab_size], is defined on rank 0 alone, until the next call.
        """
