"""Triton's interpreter for tests of exactness: products that treat all rows of a tile alike."""

import os

import numpy as np
import pytest


def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of the interpreter sum all rows of a tile alike, as matrix units do and NumPy's library does not.

    Else the same row has other bits at another place of a tile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=None: np.einsum("ik,kj->ij", a, b, dtype=dtype))
