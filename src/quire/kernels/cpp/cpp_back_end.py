"""Back end of the C++ extension: its ops."""

from functools import partial
from typing import Any


def cpp_ops(isa: str) -> dict[str, Any]:
    """Return the ops of a back end by field, in C++ for one instruction set: from now on the whole process's."""
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)
    from quire.kernels.cpp import (  # noqa: PLC0415
        cpp_attention,
        cpp_delta_net,
        cpp_experts,
        cpp_kv_cache,
        cpp_linear,
        cpp_norm,
        cpp_packing,
        cpp_sampling,
        cpp_short_conv,
        dtypes,
        fused_ops,
    )
    from quire.kernels.kv_cache import CacheLayout  # noqa: PLC0415
    from quire.kernels.tensors import NUMPY_LIBRARY  # noqa: PLC0415

    _kernels.use_isa(isa)
    memory = cpp_packing.PackedMemory()
    return {
        "library": NUMPY_LIBRARY,
        "linear": partial(cpp_linear.CppLinear, memory=memory),
        "head": partial(cpp_linear.CppHead, memory=memory),
        "low_rank_up": cpp_linear.CppUp,
        "experts": cpp_experts.CppExperts,
        "fuse": fused_ops.fuse,
        "cache_layout": CacheLayout(
            cpp_kv_cache.cache_shapes, dtypes.kernel_dtype, cpp_kv_cache.STORED, NUMPY_LIBRARY.dtype
        ),
        "paged_attention": cpp_attention.paged_attention,
        "write_kv": cpp_kv_cache.write_kv,
        "copy_blocks": cpp_kv_cache.copy_blocks,
        "short_conv": cpp_short_conv.short_conv,
        "delta_net": cpp_delta_net.delta_net,
        "mamba": cpp_delta_net.mamba,
        "gate": cpp_delta_net.gate,
        "norm": cpp_norm.CppNorm,
        "embed": cpp_linear.embed,
        "sampling": cpp_sampling.OPS,
        "has_tables": True,
    }
