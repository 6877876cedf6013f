"""Cost of a step by its number of rows, from constants of the instruction set: it decides the lengths of drafts.

A step reads all weights once and multiplies them by every row. With few rows it is bound by memory, with many by
arithmetic. One number describes a machine and a weight format: the number of rows at which the products take as long as
reading the weights. No time is measured, so equal requests give equal steps.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.model.weight_counts import ExpertReads

# Products that take as long as reading one byte: of floats, of integers of 8 bits, and of 4. One thread of a Zen 4 for
# all but amx and cuda: docs/speculation.md has its step times, docs/kernels.md its rates. More cores on one memory have
# more. 4 bits with VNNI are by its speeds of decoding: five rows take 1.62 to 1.89 times as long as one, median 1.69.
PRODUCTS_PER_BYTE = {
    "portable": (0.5, 0.5, 0.5), "avx2": (1.6, 2.4, 2.4), "avx512": (2.1, 3.5, 3.5), "avx512_vnni": (2.1, 8.0, 6.3),
    "avx512_bf16": (4.0, 8.0, 6.3), "amx": (14.0, 12.0, 12.0), "cuda": (60.0, 60.0, 60.0),
}  # fmt: skip
# Weights of fewer bytes, their scales included, are integers, and of 4 bits.
_INTEGER_BYTES, _HALF_BYTES = 1.5, 0.8


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step, in units of reading all weights once.

    `rows_per_read`: number of rows with products that take as long as that. `draft_cost`: of one forward pass of a
    draft model, in the same unit; k drafts take k passes, and no drafts one. Of a model with `experts` the unit is
    reading the weights of one row, and more rows read more of them.
    """

    rows_per_read: float
    draft_cost: float = 0.0
    experts: ExpertReads | None = None

    @classmethod
    def of(
        cls, kernels: str, bytes_per_weight: float, draft_cost: float = 0.0,
        experts: ExpertReads | None = None,
    ) -> "StepCost":  # fmt: skip
        """Return the cost with an instruction set, or `cuda`; another name counts as `portable`."""
        rates = PRODUCTS_PER_BYTE.get(kernels, PRODUCTS_PER_BYTE["portable"])
        rate = rates[(bytes_per_weight < _INTEGER_BYTES) + (bytes_per_weight < _HALF_BYTES)]
        return cls(rate * bytes_per_weight, draft_cost, experts)

    def __call__(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of a step with each number of rows, with one pass of the draft model."""
        return np.hypot(self._read(num_rows), num_rows / self.rows_per_read) + self.draft_cost

    def most_gain(self, num_rows: int) -> float:
        """Return an upper bound on the speedup by drafts, a factor of at least 1, in a step of `num_rows` rows.

        It is reached by drafts of unlimited length that are all accepted: then only the products cost anything.
        """
        return math.hypot(1.0, float(self._read(np.array([num_rows]))[0]) * self.rows_per_read / num_rows)

    def _read(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights that a step with each number of rows reads, by those of one row."""
        return np.ones(len(num_rows)) if self.experts is None else self.experts.weights(num_rows)
