"""Looking for NaN and infinity in C++ (csrc/packing.cpp), by the threads that pack the weights next."""

from torch import Tensor

from quire.kernels import finite
from quire.kernels.cpp.dtypes import pair

_ALL_FINITE = pair("all_finite")


def all_finite(tensor: Tensor) -> bool:
    """Tell whether no value of a floating-point tensor, which has at least one, is NaN or infinite."""
    kernel = _ALL_FINITE.get(tensor.dtype)
    if kernel is None or not tensor.is_contiguous():
        return finite.all_finite(tensor)
    return bool(kernel(tensor.data_ptr(), tensor.numel()))
