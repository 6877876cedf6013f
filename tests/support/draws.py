"""Settings of draws for kernels of sampling, from columns."""

import numpy as np
from numpy.typing import NDArray

from quire.kernels.sampling import SETTINGS


def draws_of(
    temperatures: NDArray[np.float32], log_min_ps: NDArray[np.float32], top_ks: NDArray[np.int32],
    top_ps: NDArray[np.float64], uniforms: NDArray[np.float64],
) -> NDArray[np.void]:  # fmt: skip
    """Return SETTINGS [num_rows]."""
    draws = np.empty(len(uniforms), SETTINGS)
    columns = {
        "temperatures": temperatures, "log_min_ps": log_min_ps, "top_ks": top_ks, "top_ps": top_ps,
        "uniforms": uniforms,
    }  # fmt: skip
    for name, column in columns.items():
        draws[name] = column
    return draws
