"""Arrays as tensors of torch on the CPU, and tensors as arrays, in the same memory."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, Array, DType, bits

_OWN_DTYPES: Mapping[DType, torch.dtype] = {BFLOAT16: torch.bfloat16, FLOAT8_E4M3: torch.float8_e4m3fn}
_BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16}  # by bytes of an element


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype of an array's."""
    found: torch.dtype = _OWN_DTYPES[dtype] if dtype.names else torch.from_numpy(np.empty(0, dtype)).dtype
    return found


def array_dtype(dtype: torch.dtype) -> DType:
    """Return the dtype of an array for torch's."""
    return to_array(torch.empty(0, dtype=dtype)).dtype


def to_tensor(array: Array) -> Tensor:
    """Return an array as a tensor of the same memory, which must be writable: torch knows no other."""
    own = _OWN_DTYPES.get(array.dtype)
    return torch.from_numpy(array) if own is None else torch.from_numpy(bits(array)).view(own)


def to_array(tensor: Tensor) -> Array:
    """Return a tensor on the CPU as an array of the same memory."""
    for own, dtype in _OWN_DTYPES.items():
        if tensor.dtype == dtype:
            return tensor.view(_BITS[dtype.itemsize]).numpy().view(own)
    array: Array = tensor.numpy()
    return array
