"""Triton's interpreter for tests: prepared once a launch, and with products that treat all rows of a tile alike."""

import os
from types import SimpleNamespace

import numpy as np
import pytest


def prepare_once_a_launch() -> None:
    """Let a launch prepare the whole language for the interpreter, and functions that a kernel calls nothing more.

    Triton looks through the language again in each of these calls: a third of the time of a kernel.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        return function.rewrite()(*args, **kwargs)

    prepare, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda _: prepare(whole)
    interpreter.InterpretedFunction.__call__ = call


def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of the interpreter sum all rows of a tile alike, as matrix units do and NumPy's library does not.

    Else the same row has other bits at another place of a tile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=None: np.einsum("ik,kj->ij", a, b, dtype=dtype))
