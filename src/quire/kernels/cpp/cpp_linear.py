"""Linear layers in C++ over weights that are packed once, at load, into huge pages; csrc/linear.cpp has the kernels."""

import numpy as np

from quire.core.arrays import FLOAT32, Array, DType, empty
from quire.core.errors import ConfigError
from quire.kernels.conversion import converted
from quire.kernels.cpp import _kernels
from quire.kernels.cpp.cpp_packing import PackedMemory, PackedWeight, kernel_format, pack
from quire.kernels.cpp.dtypes import address, is_in_rows, kernel_dtype, pair, row_stride
from quire.kernels.linear import GATED, Activation
from quire.kernels.linear_weight import LinearWeight

_MULTIPLY = pair("linear")


class CppLinear:
    """y = activation(x W^T + addend + b) for x [num_rows, in_features]; result [num_rows, out_features].

    bias [out_features] or None. Of a gated activation weight and bias have twice as many rows, gates and then ups. The
    weight is packed into `memory` and not kept, unless it is packed already. A dense weight in bfloat16 is multiplied
    as it is and summed in float32, any other dense one in float32; sums of a quantized one with int8 activations are
    those of `quantized.a8_sums`, of any other quantized one, to the bit, those of the dense weight that it expands to.
    `dtype` is the result's: the model's, or float32.
    """

    def __init__(
        self,
        weight: LinearWeight | PackedWeight,
        bias: Array | None = None,
        *,
        dtype: DType | None = None,
        activation: Activation = "none",
        memory: PackedMemory | None = None,
    ) -> None:
        if isinstance(weight, LinearWeight) and kernel_format(weight) not in _kernels.WEIGHT_FORMATS:
            served = " or ".join(_kernels.WEIGHT_FORMATS)
            raise ConfigError(
                f"the C++ kernels do not support weight format {kernel_format(weight)} yet; they serve {served}"
            )
        self._num_layers = num_layers = 2 if activation in GATED else 1
        self._out_features, self._in_features = weight.out_features // num_layers, weight.in_features
        self._dtype = kernel_dtype(weight.value_dtype)
        self._out_dtype = dtype or weight.value_dtype
        self._sum_dtype = FLOAT32 if self._out_dtype != self._dtype else self._dtype  # as the kernel writes it
        self.packed_weight = weight if isinstance(weight, PackedWeight) else pack(
            weight, self._dtype, num_layers, memory or PackedMemory()
        )  # fmt: skip
        self._format = self.packed_weight.format
        self.num_bytes = self.packed_weight.packed.nbytes
        self.bias = None if bias is None else np.ascontiguousarray(converted(bias, FLOAT32))
        self._multiply = _MULTIPLY[self._dtype]
        self._activation = getattr(_kernels.Activation, activation)
        self._addresses = address(self.packed_weight.packed), address(self.bias)

    @property
    def weights(self) -> _kernels.LinearWeights:
        """The layer as the extension takes it, valid for as long as the layer is kept."""
        return _kernels.LinearWeights(
            *self._addresses, self._in_features, self._out_features, self._activation, *self._format
        )

    @property
    def packed_address(self) -> int:
        """Where the packed weight begins."""
        return self._addresses[0]

    @property
    def kernel_dtype(self) -> DType:
        """The dtype in which the kernel takes rows."""
        return self._dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of a row."""
        return self._in_features, self._out_features

    def __call__(self, x: Array, addend: Array | None = None, /, out: Array | None = None) -> Array:
        """Multiply all rows in one call; how many there are changes no row.

        addend: float32 [num_rows, rows of the weight], added to the sums before the bias; rows may have gaps.
        out: [num_rows, out_features] in the dtype of the sums, which it is written to; rows may have gaps.
        """
        num_rows, width = x.shape
        if addend is not None:
            assert addend.dtype == FLOAT32, f"an addend of {addend.dtype}"
            assert addend.shape == (num_rows, self._out_features * self._num_layers), f"an addend {addend.shape}"
            assert is_in_rows(addend), "an addend with gaps between outputs"
        assert width == self._in_features, f"{x.shape} for {self._in_features} inputs"
        if x.dtype != self._dtype or not is_in_rows(x):
            x = np.ascontiguousarray(converted(x, self._dtype))
        if out is None:
            out = np.empty((num_rows, self._out_features), self._sum_dtype)
        assert (out.dtype, out.shape) == (self._sum_dtype, (num_rows, self._out_features)), f"{out.dtype} {out.shape}"
        assert is_in_rows(out), "a result with gaps between outputs"
        self._multiply(
            _kernels.address(x),
            num_rows,
            width,
            row_stride(x),
            self._addresses[0],
            self._out_features,
            self._addresses[1],
            _kernels.address(out),
            row_stride(out),
            self._sum_dtype == FLOAT32,
            self._activation,
            *self._format,
            0 if addend is None else address(addend),
            0 if addend is None else row_stride(addend),
            0,
        )
        return out if self._sum_dtype == self._out_dtype else converted(out, self._out_dtype)


class CppHead(CppLinear):
    """A layer to float32 logits, which are kept in one buffer: each call returns the first rows of it.

    A fresh result above 32 MiB, 55 rows of a vocabulary of 152,000, would be mapped anew by each step, and each of its
    pages faulted. The buffer has twice the rows when it must grow; pages that were never written to take no memory.
    """

    def __init__(
        self, weight: LinearWeight | PackedWeight, bias: Array | None = None, *, memory: PackedMemory | None = None
    ) -> None:
        super().__init__(weight, bias, dtype=FLOAT32, memory=memory)
        self._logits = np.empty(0, FLOAT32)  # float32, at least the most rows so far x out_features

    def __call__(self, x: Array, addend: Array | None = None, /, out: Array | None = None) -> Array:
        """Multiply all rows as `CppLinear` does; without `out` the result is defined until the next call."""
        if out is None:
            size = len(x) * self._out_features
            if size > len(self._logits):
                self._logits = empty(2 * size, FLOAT32)
            out = self._logits[:size].reshape(len(x), self._out_features)
        return super().__call__(x, addend, out=out)
