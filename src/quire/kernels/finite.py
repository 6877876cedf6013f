"""Whether weights are numbers at all: a checkpoint with NaN or infinity would answer with noise."""

import math

from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Tell whether no value of a floating-point tensor, which has at least one, is NaN or infinite."""
    # NaN wins both comparisons, so the two ends tell; unlike isfinite().all() this builds no mask.
    return all(math.isfinite(end.item()) for end in tensor.aminmax())
