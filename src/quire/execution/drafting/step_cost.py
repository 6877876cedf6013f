"""Cost of a step by its rows: the arithmetic that decides how long drafts may be. Numbers of a machine, no clocks.

A step reads all weights once and multiplies them by every row. With few rows the memory is what it waits for, with many
the products; between the two both count. So one number describes a machine and a weight format: the rows whose
products take as long as the reading.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Products that take as long as reading one byte: of floats, and of integers. One thread of a Zen 4 for all but amx and
# cuda: docs/speculation.md has its step times, docs/kernels.md its rates. More cores on one memory have more.
PRODUCTS_PER_BYTE = {
    "portable": (0.5, 0.5), "avx2": (1.6, 2.4), "avx512": (2.1, 3.5), "avx512_vnni": (2.1, 8.0),
    "avx512_bf16": (4.0, 8.0), "amx": (14.0, 12.0), "cuda": (60.0, 60.0),
}  # fmt: skip
_INTEGER_BYTES = 1.5  # a weight of fewer is one of integers, its scales included


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step; 1 is that of reading the weights.

    `rows_per_read`: rows whose products take as long as that. `draft_cost`: of one forward pass of a draft model.
    """

    rows_per_read: float
    draft_cost: float = 0.0

    @classmethod
    def of(cls, kernels: str, bytes_per_weight: float, draft_cost: float = 0.0) -> "StepCost":
        """Return the cost with an instruction set, or `cuda`; another name counts as `portable`."""
        floats, integers = PRODUCTS_PER_BYTE.get(kernels, PRODUCTS_PER_BYTE["portable"])
        products_per_byte = integers if bytes_per_weight < _INTEGER_BYTES else floats
        return cls(products_per_byte * bytes_per_weight, draft_cost)

    def __call__(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of a step with each number of rows."""
        return np.hypot(1.0, num_rows / self.rows_per_read)

    def most_gain(self, num_rows: int) -> float:
        """Return the gain, a factor, of a step of so many rows, at least 1, with endless drafts that are all kept.

        Its tokens by cost are then those of products alone.
        """
        return self.rows_per_read * float(self(np.array([num_rows]))[0]) / num_rows
