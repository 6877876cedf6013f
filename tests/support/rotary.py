"""Rotary tables of tests, as tensors."""

import torch
from torch import Tensor

from quire.kernels.torch_arrays import to_array, to_tensor
from quire.model.rope import rotary_table


def frequencies(rotary_dim: int) -> Tensor:
    """Return the usual frequencies, float32 [rotary_dim / 2]."""
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def table_of(inv_freq: Tensor, num_positions: int) -> Tensor:
    """Return cosines and sines, float32 [num_positions, rotary_dim]."""
    return to_tensor(rotary_table(to_array(inv_freq), num_positions))
