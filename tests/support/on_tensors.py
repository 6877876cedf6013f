"""The C++ kernels called with PyTorch's tensors, and their results as tensors: the same memory, looked at as arrays.

Tests compare each kernel with its reference, which is PyTorch's.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.back_end import BackEnd
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.sampling import SAMPLING
from quire.kernels.sampling import SamplingOps
from quire.kernels.torch_arrays import TORCH_LIBRARY, array_dtype, to_array, to_tensor, torch_dtype
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch, LanguageModel


def arrays(value: Any) -> Any:  # noqa: ANN401 (anything that an op is called with)
    """Return a value with the tensors and dtypes in it as arrays and their dtypes."""
    if isinstance(value, Tensor):
        return to_array(value.detach())
    if isinstance(value, torch.dtype):
        return array_dtype(value)
    return _mapped(value, arrays)


def tensors(value: Any) -> Any:  # noqa: ANN401 (anything that an op returns)
    """Return a value with the arrays in it as tensors."""
    return to_tensor(value) if isinstance(value, np.ndarray) else _mapped(value, tensors)


def _mapped(value: Any, form: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    if isinstance(value, tuple | list):
        found = [form(each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("quire"):
        changed = {each.name: form(getattr(value, each.name)) for each in fields(value) if each.init}
        return replace(value, **changed)
    return value


def called(op: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 (what the op returns)
    """Return what an op of arrays computes of tensors, as tensors."""
    return tensors(op(*arrays(args)))


class TensorHook:
    """An exchange of arrays between ranks, called with tensors."""

    def __init__(self, hook: Any) -> None:  # noqa: ANN401 (a GatherHook or a SumHook)
        self._hook = hook
        self.partial_dtype = tensor_dtype(getattr(hook, "partial_dtype", None))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._hook, name)

    def __call__(self, *args: object) -> Tensor:
        found: Tensor = called(self._hook, *args)
        return found


def tensor_dtype(dtype: Any) -> torch.dtype | None:  # noqa: ANN401 (of an array, or None)
    return None if dtype is None else torch_dtype(dtype)


def on_tensors(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op of arrays as one of tensors, or a class of layers as one whose instances take tensors."""
    if not isinstance(op, type):
        return lambda *args, **kwargs: tensors(op(*arrays(args), **{name: arrays(x) for name, x in kwargs.items()}))

    class OnTensors(op):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*arrays(args), **{name: arrays(x) for name, x in kwargs.items()})

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
                return super().__call__(*args, **kwargs)
            return tensors(super().__call__(*arrays(args), **{name: arrays(x) for name, x in kwargs.items()}))

    OnTensors.__name__ = op.__name__
    return OnTensors


def run(model: LanguageModel, batch: ForwardBatch, cache: KVCache) -> Tensor:
    """Return the logits of a batch of tensors, float32 [num_tokens, vocab_size], in memory of their own."""
    return torch.as_tensor(model.logits(model.forward(taken(model, batch), cache))).clone()


def taken(model: LanguageModel, value: Any) -> Any:  # noqa: ANN401 (tensors)
    """Return tensors as the model takes them: itself, or as arrays."""
    return value if model.back_end.library is TORCH_LIBRARY else arrays(value)


def logits_of(ops: SamplingOps, values: NDArray[np.float32]) -> Any:  # noqa: ANN401 (an array, or a tensor)
    """Return logits as these ops take them, in memory of their own."""
    return torch.from_numpy(values.copy()) if ops is SAMPLING else values.copy()


def linear_of(back_end: BackEnd, weight: LinearWeight, x: Tensor) -> Tensor:
    """Return what a back end's layer computes, of tensors."""
    if back_end.library is TORCH_LIBRARY:
        return back_end.linear(weight)(x)  # type: ignore[no-any-return]
    return called(back_end.linear(arrays(weight)), x)  # type: ignore[no-any-return]
