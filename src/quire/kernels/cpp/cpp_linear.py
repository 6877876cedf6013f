"""Linear layers in C++ over weights packed once, at load, into huge pages; embedding lookup, and adapters' B."""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import BFLOAT16, FLOAT32, Array, DType, empty
from quire.core.errors import ConfigError
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_packing import PackedMemory, PackedTable, PackedWeight, kernel_format, pack, pack_portions
from quire.kernels.cpp.dtypes import address, is_in_rows, kernel_dtype, pair, row_stride
from quire.kernels.layers import GATED, Activation
from quire.kernels.linear_weight import LinearWeight, Table, WeightPortions
from quire.kernels.tensors import added

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
        """Address of the first byte of the packed weight."""
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
        self, weight: LinearWeight | PackedWeight | WeightPortions, bias: Array | None = None, *,
        memory: PackedMemory | None = None,
    ) -> None:  # fmt: skip
        if isinstance(weight, WeightPortions):
            weight = pack_portions(weight, memory or PackedMemory())
        super().__init__(weight, bias, dtype=FLOAT32, memory=memory)
        self._logits = np.empty(0, FLOAT32)  # float32, at least the most rows so far x out_features

    @property
    def table(self) -> PackedTable:
        """The embedding table of a head that is tied to it."""
        return PackedTable(self.packed_weight)

    def __call__(self, x: Array, addend: Array | None = None, /, out: Array | None = None) -> Array:
        """Multiply all rows as `CppLinear` does; without `out` the result is defined until the next call."""
        if out is None:
            size = len(x) * self._out_features
            if size > len(self._logits):
                self._logits = empty(2 * size, FLOAT32)
            out = self._logits[:size].reshape(len(x), self._out_features)
        return super().__call__(x, addend, out=out)


_KERNELS = pair("embedding")


def embed(
    table: Table, token_ids: NDArray[np.int64], position_table: Array | None = None,
    positions: NDArray[np.int64] | None = None,
) -> Array:  # fmt: skip
    """Return what `reference.embedding.embed` returns; tables without gaps. In float16 no kernel is needed."""
    if not isinstance(table, np.ndarray) or table.dtype not in _KERNELS:
        found: Array = _taken(table, token_ids) if isinstance(table, np.ndarray) else table.look_up(token_ids)
        if position_table is not None:
            found = added(found, _taken(position_table, positions))
        return found
    num_tokens, width = len(token_ids), table.shape[1]
    assert token_ids.dtype == np.int64
    assert table.flags.c_contiguous, "a table with gaps"
    assert token_ids.flags.c_contiguous, "ids with gaps"
    more = 0, 0, 0
    if position_table is not None:
        assert positions is not None
        assert position_table.dtype == table.dtype
        assert position_table.shape[1] == width
        assert positions.dtype == np.int64
        assert positions.shape == token_ids.shape
        assert position_table.flags.c_contiguous, "a table with gaps"
        assert positions.flags.c_contiguous, "positions with gaps"
        more = address(position_table), len(position_table), address(positions)
    out = np.empty((num_tokens, width), table.dtype)
    at = _kernels.address
    _KERNELS[table.dtype](at(table), len(table), at(token_ids), *more, at(out), num_tokens, width)
    return out


def _taken(table: Array, ids: NDArray[np.int64] | None) -> Array:
    """Return rows of a table. IndexError for an id that it has not: NumPy counts negative ones from the end."""
    assert ids is not None
    if ids.size and ids.min() < 0:
        raise IndexError(f"id {ids.min()} of a table of {len(table)} rows")
    return table.take(ids, axis=0)


_ADDENDS, _PACK, _PACKED_SIZE = pair("low_rank_product"), pair("pack"), pair("packed_size")


class CppUp:
    """inner B^T for inner [num_rows, rank]; result float32 [num_rows, num_outputs], to the bit what layers add.

    `weight`: B [num_outputs, rank] with its scale. It is packed into `memory` by words, of a float or of a pair of
    bfloat16, and has no more padding than a zero behind an odd rank.
    """

    def __init__(self, weight: Array, *, memory: PackedMemory | None = None) -> None:
        self._num_outputs, self._rank = weight.shape
        self._dtype = kernel_dtype(weight.dtype)
        words = np.ascontiguousarray(converted(weight, self._dtype))
        if self._dtype == BFLOAT16:
            padded = np.zeros((self._num_outputs, self._rank + self._rank % 2), BFLOAT16)
            padded[:, : self._rank] = words
            words = padded.view(FLOAT32)
        width = words.shape[1]
        size = _PACKED_SIZE[FLOAT32](self._num_outputs, width)
        self._packed = (memory or PackedMemory()).take(size, FLOAT32)
        _PACK[FLOAT32](address(words), width, self._num_outputs, width, address(self._packed), 1)
        self.num_bytes = self._packed.nbytes

    @property
    def packed_address(self) -> int:
        """Address of the first byte of the packed weight."""
        return address(self._packed)

    def __call__(self, inner: Array, /) -> Array:
        """Multiply all rows in one call; how many there are changes no row."""
        num_rows, rank = inner.shape
        assert rank == self._rank, f"{inner.shape} for a rank of {self._rank}"
        inner = np.ascontiguousarray(converted(inner, self._dtype))
        out = np.empty((num_rows, self._num_outputs), FLOAT32)
        _ADDENDS[self._dtype](
            address(inner),
            num_rows,
            rank,
            rank,
            self.packed_address,
            self._num_outputs,
            address(out),
            self._num_outputs,
        )
        return out
