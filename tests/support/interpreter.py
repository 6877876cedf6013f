"""Triton's interpreter for tests: prepared once a launch, without work that it repeats, and with rows treated alike."""

import math
import operator
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


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


def make_types_once() -> None:
    """Let equal types be one object, tensors of a type have one shape, and a sum of integers be checked by NumPy.

    Triton makes them anew for each operand of each operation, and checks for overflow in five operations of its own:
    together half of the time of a kernel.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    known: dict[tuple[object, ...], core.block_type] = {}
    make_type, find_numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    numpy_types: dict[str, np.dtype[Any]] = {}
    scalar_shape = core.tuple([]), core.constexpr(1)

    def find_type(cls: type, element_ty: core.dtype, shape: Any) -> core.block_type:  # noqa: ANN401
        key = element_ty.name, *[core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape)]
        return known.setdefault(key, object.__new__(cls))

    def init_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:  # noqa: ANN401
        if "name" not in vars(self):
            make_type(self, element_ty, shape)
            sizes = [*self.shape]
            self.of_tensors = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:  # noqa: A002 (Triton's name)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar_shape

    def numpy_type(dtype: core.dtype) -> np.dtype[Any]:
        if (found := numpy_types.get(dtype.name)) is None:
            found = numpy_types[dtype.name] = find_numpy_type(dtype)
        return found

    def check_overflow(self: semantic.TritonSemantic, left: core.tensor, right: core.tensor, add: Any) -> None:  # noqa: ANN401
        kind = left.type.scalar
        if kind.int_bitwidth < 64:
            wide = OPERATORS[add.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            is_right = kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
            assert is_right, f"{kind} overflow detected for operation {add.__name__}"

    core.block_type.__new__, core.block_type.__init__ = find_type, init_type
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = numpy_type
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of the interpreter sum all rows of a tile alike, as matrix units do and NumPy's library does not.

    Else the same row has other bits at another place of a tile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype=None: np.einsum("ik,kj->ij", a, b, dtype=dtype))
