"""Columns of ranks in collectives of torch.distributed, which have parts of one size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.model.sharding import Cut


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8, which every collective takes.

    An axis of one element, which may have any stride, often has none where NumPy has added it.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def widest(cut: Cut) -> int:
    """Return the most columns of a rank: ranks may have different numbers, the parts of a collective may not."""
    return max(cut.of(rank)[1] - cut.of(rank)[0] for rank in range(len(cut.bounds) - 1))


def padded(own: Tensor, cut: Cut) -> Tensor:
    """Return own [num_rows, columns of a rank], contiguous, with room for the most columns of a rank."""
    num_missing = widest(cut) - own.shape[1]
    return F.pad(own, (0, num_missing)) if num_missing else own.contiguous()  # to pad by nothing would copy


def joined(received: Tensor, cut: Cut) -> Tensor:
    """Return the columns of all ranks [num_rows, width] of received [num_ranks, num_rows, most columns]."""
    parts = [part[:, : cut.of(rank)[1] - cut.of(rank)[0]] for rank, part in enumerate(received.unbind())]
    return torch.cat(parts, dim=1)
