"""Bytes of packed linear weights, by back end and weight format. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Packing:
    """Storage of linear weights in a back end: rows and inputs padded to multiples, dtypes, a tied head kept twice."""

    row_multiple: int
    input_multiple: int            # of bfloat16 weights
    kernel_dtypes: frozenset[str]  # everything else is float32, the KV cache too
    copies_tied_head: bool

    def kernel_dtype(self, dtype: str) -> str:
        """Return the dtype in which weights and KV cache of a model of `dtype` are kept."""
        return dtype if dtype in self.kernel_dtypes else "float32"

    def num_weights(self, num_rows: int, width: int, dtype: str) -> int:
        """Return the elements of a packed weight, padding among them."""
        inputs = self.input_multiple if dtype == "bfloat16" else 1
        return -(-num_rows // self.row_multiple) * self.row_multiple * -(-width // inputs) * inputs


CPU_PACKING = Packing(16, 32, frozenset({"float32", "bfloat16"}), copies_tied_head=True)
PLAIN_PACKING = Packing(1, 1, frozenset(DTYPE_BYTES), copies_tied_head=False)


def packed_bytes(weight_format: str, num_rows: int, width: int, dtype: str, packing: Packing) -> int:
    """Return the bytes of a packed weight [num_rows, width]; ConfigError for a format that is not known."""
    if weight_format not in _PACKED_BYTES:
        raise ConfigError(f"weight format {weight_format} is not supported yet; known are {', '.join(_PACKED_BYTES)}")
    return _PACKED_BYTES[weight_format](num_rows, width, dtype, packing)


def _dense_bytes(num_rows: int, width: int, dtype: str, packing: Packing) -> int:
    kernel_dtype = packing.kernel_dtype(dtype)
    return packing.num_weights(num_rows, width, kernel_dtype) * DTYPE_BYTES[kernel_dtype]


_PACKED_BYTES: dict[str, Callable[[int, int, str, Packing], int]] = {"dense": _dense_bytes}
