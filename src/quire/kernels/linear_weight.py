"""Weights in transit: what a weight format reads of a checkpoint and a back end packs.

A quantized element is one byte, and its value is, in float32,

    int8, int4   scale * (q - zero point), or (scale * q) - minimum; q from 0 to 255 or 15
    fp8          scale * value of the float8_e4m3fn with these bits
    codebook4    scale * codebook[q], q from 0 to 15

`quire.kernels.quantized` has the two arithmetics of layers with such weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from quire.core.arrays import Array, concatenated, dtype_name
from quire.core.errors import ConfigError

STRIP_ROWS = 16  # outputs that kernels of a CPU pack together
DENSE = "dense"  # the format of unquantized weights
INT8, INT4, FP8, CODEBOOK4 = "int8", "int4", "fp8", "codebook4"
INTEGER_FORMATS = (INT8, INT4)
ZERO_POINTS = {INT8: 128, INT4: 8}  # where weights are quantized while they are loaded
QUANTIZED_FORMATS = (INT8, INT4, FP8, CODEBOOK4)
MAX_ACTIVATION_GROUP = 66_000  # inputs: sums of products of 8-bit integers stay below 2^31

Elements = Any  # an Array, or PyTorch's tensor of one: a format makes arrays, `torch_arrays` makes tensors of them


@runtime_checkable
class StoredTable(Protocol):
    """An embedding table in another form than floats, as a file has it: in less memory, and read sooner."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""

    @property
    def stored(self) -> tuple[str, Array]:
        """The form of the rows, and their memory."""

    def look_up(self, token_ids: Any) -> Any:  # noqa: ANN401 (arrays, or tensors of PyTorch)
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""


Table = Elements | StoredTable  # [num_rows, width]


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weight [out_features, in_features] of a linear layer, in a weight format.

    `data` are its elements in parts, the rows of one after those of the other: floats [rows, in_features] of a dense
    weight, uint8 [rows, in_features] of a quantized one. The other fields are those of quantized weights, of all rows
    together, None or 0 where a weight has none. An output has `num_groups` scales, of `group_size` inputs each: the
    last group may have fewer, and a longer group than the row is the row.
    """

    format: str                              # a back end chooses its kernel for it
    data: tuple[Elements, ...]
    out_features: int
    in_features: int
    scales: Elements | None = None           # float32 [out_features, num_groups]
    zero_points: Elements | int | None = None  # integers alone: uint8, shaped as the scales; or one for all
    group_size: int = 0
    group_index: Elements | None = None      # int32 [in_features], each input's group; None: groups are consecutive
    activation_group_size: int = 0           # inputs of a row that share a scale of int8 activations; 0: not quantized
    minimums: Elements | None = None         # integers alone, in place of zero points: float32, shaped as the scales
    codebook: Elements | None = None         # codebook4 alone: float32 [16]
    dtype: Any = None                        # inputs, results and expanded values of a quantized layer: the model's

    def __post_init__(self) -> None:
        if self.format in QUANTIZED_FORMATS:
            self._check()

    @classmethod
    def dense(cls, weight: Elements | Sequence[Elements]) -> "LinearWeight":
        """Return a weight of floats [out_features, in_features], whole or in parts."""
        parts = tuple(weight) if isinstance(weight, list | tuple) else (weight,)
        return cls(DENSE, parts, sum(map(len, parts)), parts[0].shape[1])

    @classmethod
    def stack(cls, weights: Sequence["LinearWeight"]) -> "LinearWeight":
        """Return the rows of all weights, one after those of the other; but for them, the weights are alike."""
        first, zeros = weights[0], [each.zero_points for each in weights]
        arrays = [each for each in zeros if not isinstance(each, int | None)]
        assert not arrays or len(arrays) == len(zeros), "zero points of some weights"
        assert arrays or len(set(zeros)) == 1, f"zero points {zeros}"
        return replace(
            first,
            data=tuple(part for each in weights for part in each.data),
            out_features=sum(each.out_features for each in weights),
            scales=_rows([each.scales for each in weights]),
            zero_points=_rows(arrays) if arrays else first.zero_points,
            minimums=_rows([each.minimums for each in weights]),
        )

    def take(self, rows: Array) -> "LinearWeight":
        """Return the weight of these rows [num_rows] int64, in their order."""
        taken = [None if each is None else each[rows] for each in (self.scales, self.minimums)]
        zeros = self.zero_points if isinstance(self.zero_points, int | None) else self.zero_points[rows]
        return replace(
            self, data=(self.elements()[rows],), out_features=len(rows), scales=taken[0], minimums=taken[1],
            zero_points=zeros,
        )  # fmt: skip

    @property
    def input_unit(self) -> int:
        """Inputs at multiples of which `take_inputs` may cut: those that share a scale; 0: it cannot cut anywhere."""
        if self.format == DENSE:
            return 1
        if self.group_index is not None:
            return 0
        return 1 if self.num_groups == 1 else self.group_size

    def take_inputs(self, start: int, stop: int) -> "LinearWeight":
        """Return the weight of inputs [start, stop), which are multiples of `input_unit`, or `stop` the last."""
        assert self.input_unit, "groups of inputs that are not consecutive"
        assert start % self.input_unit == 0, f"a cut at {start} in groups of {self.input_unit}"
        assert stop == self.in_features or stop % self.input_unit == 0, f"a cut at {stop}"
        data = tuple(np.ascontiguousarray(part[:, start:stop]) for part in self.data)
        if self.format == DENSE or self.num_groups == 1:
            return replace(self, data=data, in_features=stop - start)
        groups = slice(start // self.group_size, -(-stop // self.group_size))
        zeros = self.zero_points if isinstance(self.zero_points, int | None) else _columns(self.zero_points, groups)
        return replace(
            self, data=data, in_features=stop - start, scales=_columns(self.scales, groups), zero_points=zeros,
            minimums=_columns(self.minimums, groups),
        )  # fmt: skip

    @property
    def num_groups(self) -> int:
        """Scales of an output."""
        return -(-self.in_features // self.group_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        corrections = (self.scales, self.zero_points, self.group_index, self.minimums, self.codebook)
        return sum(each.nbytes for each in (*self.data, *corrections) if not isinstance(each, int | None))

    @property
    def value_dtype(self) -> Any:  # noqa: ANN401 (an array's, or PyTorch's)
        """Dtype of the layer's inputs and results: the model's."""
        return self.data[0].dtype if self.dtype is None else self.dtype

    def elements(self) -> Array:
        """Return the elements [out_features, in_features]: its only part itself, or all parts in a copy."""
        return self.data[0] if len(self.data) == 1 else concatenated(self.data)

    def dense_parts(self) -> tuple[Elements, ...]:
        """Return the parts of a dense weight; ConfigError for any other format, which the caller does not serve."""
        if self.format != DENSE:
            raise ConfigError(f"weight format {self.format} is not supported yet on this back end; it serves {DENSE}")
        return self.data

    def _check(self) -> None:
        """Assert that the fields fit one another: a reader refuses what a file says wrongly before it comes here."""
        assert self.group_size > 0, "a quantized weight without a group size"
        grouped = self.out_features, self.num_groups
        for part in self.data:
            assert dtype_name(part.dtype) == "uint8", f"elements of {part.dtype}"
            assert part.shape[1:] == (self.in_features,), f"a part {list(part.shape)} of {self.in_features} inputs"
        assert sum(map(len, self.data)) == self.out_features, f"parts of other than {self.out_features} outputs"
        assert self.scales is not None, "a quantized weight without scales"
        assert self.dtype is not None, "a quantized weight without the model's dtype"
        for each in (self.scales, self.minimums):
            assert each is None or (dtype_name(each.dtype), each.shape) == ("float32", grouped), f"no float32 {grouped}"
        if self.group_index is not None:
            index = self.group_index
            assert (dtype_name(index.dtype), index.shape) == ("int32", (self.in_features,)), "group index"
        self._check_correction(grouped)
        self._check_activations()

    def _check_correction(self, grouped: tuple[int, int]) -> None:
        zeros, has_zeros = self.zero_points, self.zero_points is not None
        assert has_zeros + (self.minimums is not None) == (self.format in INTEGER_FORMATS), "zero points or minimums"
        if isinstance(zeros, int):
            assert 0 <= zeros <= 255, f"zero point {zeros}"
        elif zeros is not None:
            found = dtype_name(zeros.dtype), zeros.shape
            assert found == ("uint8", grouped), f"zero points {found}"
        codebook = self.codebook
        assert (codebook is not None) == (self.format == CODEBOOK4), "a codebook"
        if codebook is not None:
            assert (dtype_name(codebook.dtype), codebook.shape) == ("float32", (16,)), "no codebook of 16"

    def _check_activations(self) -> None:
        size, num_inputs = self.activation_group_size, min(self.group_size, self.in_features)
        if size == 0:
            return
        assert self.format in INTEGER_FORMATS, f"int8 activations with {self.format} weights"
        assert num_inputs == self.in_features or num_inputs % size == 0, f"groups of {size} in groups of {num_inputs}"
        assert min(size, self.in_features) <= MAX_ACTIVATION_GROUP, f"activation groups of {size} inputs"


@dataclass(frozen=True, slots=True)
class WeightPortions:
    """A quantized weight that is read while it is packed, a portion of its rows at a time: it is never whole in memory.

    Portions are alike but for their rows; all but the last have a multiple of 16. One may be in the memory of the one
    before.
    """

    out_features: int
    portions: Iterable[LinearWeight]


def _columns(grouped: Array | None, groups: slice) -> Array | None:
    return None if grouped is None else np.ascontiguousarray(grouped[:, groups])


def _rows(parts: Sequence[Array | None]) -> Array | None:
    """Return the rows of all parts; None if there are none."""
    found = [part for part in parts if part is not None]
    return concatenated(found) if found else None
