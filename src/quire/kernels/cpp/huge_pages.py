"""Memory of packed weights, on huge pages (`quire.core.arrays.empty`)."""

from quire.core.arrays import UINT8, Array, DType, empty

ALIGNMENT = 64             # bytes: a cache line
MAPPED_AT_ONCE = 64 << 20  # bytes; none is used before it is written to


class PackedMemory:
    """Memory of packed weights, one after the other, so that small ones share a huge page too.

    A mapping is returned to the system when the last weight in it is freed.
    """

    def __init__(self) -> None:
        self._free = empty(0, UINT8)

    def take(self, num_elements: int, dtype: DType) -> Array:
        """Return memory for a packed weight, [num_elements]."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > len(self._free):
            self._free = empty(max(num_bytes, MAPPED_AT_ONCE), UINT8)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes + -num_bytes % ALIGNMENT :]
        return taken.view(dtype)
