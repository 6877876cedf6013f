"""Arrays as tensors of torch on the CPU, and tensors as arrays, in the same memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, Array, DType, bits
from quire.kernels.linear_weight import LinearWeight, StoredTable

_OWN_DTYPES: Mapping[DType, torch.dtype] = {BFLOAT16: torch.bfloat16, FLOAT8_E4M3: torch.float8_e4m3fn}
_BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.uint16}  # keyed by the bytes of an element


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


def weight_of_tensors(weight: LinearWeight, device: torch.device | None = None) -> LinearWeight:
    """Return a weight of arrays as one of tensors, on a CPU in the same memory."""
    return _weight_of(weight, lambda array: to_tensor(array).to(device), torch_dtype)


def weight_of_arrays(weight: LinearWeight) -> LinearWeight:
    """Return a weight of tensors on the CPU as one of arrays, in the same memory."""
    return _weight_of(weight, to_array, array_dtype)


def _weight_of(weight: LinearWeight, form: Callable[[Any], Any], dtype: Callable[[Any], Any]) -> LinearWeight:
    names = "scales", "zero_points", "group_index", "minimums", "codebook"
    fields = {name: getattr(weight, name) for name in names}
    own = {name: form(field) for name, field in fields.items() if not isinstance(field, int | None)}
    own_dtype = None if weight.dtype is None else dtype(weight.dtype)
    return replace(weight, data=tuple(map(form, weight.data)), dtype=own_dtype, **own)


class TensorTable:
    """A `StoredTable` that takes and returns arrays, for token ids that are tensors."""

    def __init__(self, table: StoredTable) -> None:
        self._table = table
        self.num_bytes = table.num_bytes

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""
        return to_tensor(self._table.look_up(to_array(token_ids)))


class TorchLibrary:
    """The `Library` of back ends in PyTorch, and of those of GPUs."""

    def dtype(self, name: str) -> torch.dtype:
        """Return a dtype by its name."""
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found

    def device(self, name: object) -> torch.device:
        """Return a device by its name, or itself."""
        return name if isinstance(name, torch.device) else torch.device(str(name))

    def tensor(self, array: Array, device: object = "cpu") -> Tensor:
        """Return an array on a device, on the CPU in the same memory."""
        return to_tensor(array).to(self.device(device))

    def weight(self, weight: LinearWeight, device: object) -> LinearWeight:
        """Return a weight of arrays as one of tensors."""
        return weight_of_tensors(weight, self.device(device))

    def table(self, table: StoredTable) -> Any:  # noqa: ANN401 (a StoredTable of tensors)
        """Return a stored table as one that takes and returns tensors."""
        return TensorTable(table)


TORCH_LIBRARY = TorchLibrary()
