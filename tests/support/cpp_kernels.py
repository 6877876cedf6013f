"""The kernels of the C++ back end as ops and layers of tensors."""

from typing import Any

from torch import Tensor

from quire.kernels.cpp import (
    cpp_attention,
    cpp_experts,
    cpp_kv_cache,
    cpp_linear,
    cpp_norm,
    cpp_sampling,
    cpp_short_conv,
    dtypes,
)
from quire.kernels.torch_arrays import torch_dtype
from support.on_tensors import arrays, on_tensors

CppLinear, CppHead = on_tensors(cpp_linear.CppLinear), on_tensors(cpp_linear.CppHead)
CppNorm, CppExperts, CppUp = map(on_tensors, (cpp_norm.CppNorm, cpp_experts.CppExperts, cpp_linear.CppUp))
paged_attention, write_kv = on_tensors(cpp_attention.paged_attention), on_tensors(cpp_kv_cache.write_kv)
embed, copy_blocks = on_tensors(cpp_linear.embed), on_tensors(cpp_kv_cache.copy_blocks)
short_conv = on_tensors(cpp_short_conv.short_conv)
cache_shapes, uniforms = on_tensors(cpp_kv_cache.cache_shapes), cpp_sampling.uniforms


def choose_tokens(logits: Tensor, draws: Any = None) -> Any:  # noqa: ANN401
    """Choose tokens, which are an array for tensors, too."""
    return cpp_sampling.choose_tokens(arrays(logits), draws)


def top_logprobs(logits: Tensor, *args: Any, **named: Any) -> Any:  # noqa: ANN401
    """Return arrays for tensors, too."""
    return cpp_sampling.top_logprobs(arrays(logits), *args, **named)


def penalize(logits: Tensor, *args: Any) -> None:  # noqa: ANN401
    """Edit the tensor's memory."""
    cpp_sampling.penalize(arrays(logits), *args)


def mask_logits(logits: Tensor, *args: Any) -> None:  # noqa: ANN401
    """Edit the tensor's memory."""
    cpp_sampling.mask_logits(arrays(logits), *args)


def kernel_dtype(dtype: object) -> object:
    return torch_dtype(dtypes.kernel_dtype(arrays(dtype)))
