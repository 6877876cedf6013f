"""Back end of the C++ extension: its instruction sets and its ops."""

import importlib.util
from functools import cache, partial
from typing import Any


@cache
def usable_isas() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this CPU has, the best first; none without the extension."""
    if importlib.util.find_spec("quire.kernels.cpp._kernels") is None:
        return ()
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    return tuple(_kernels.usable_isas())


def cpp_ops(isa: str) -> dict[str, Any]:
    """Return the ops of a back end by field, in C++ for one instruction set: from now on the whole process's."""
    from quire.kernels.cache_layout import CacheLayout  # noqa: PLC0415
    from quire.kernels.cpp import (  # noqa: PLC0415
        _kernels,
        attention,
        block_copy,
        cache_layout,
        dtypes,
        embedding,
        experts,
        huge_pages,
        kv_cache_write,
        linear,
        low_rank,
        norm,
        program,
        sampling,
    )

    _kernels.use_isa(isa)
    memory = huge_pages.PackedMemory()
    return {
        "linear": partial(linear.CppLinear, memory=memory),
        "head": partial(linear.CppHead, memory=memory),
        "low_rank_up": low_rank.CppUp,
        "experts": experts.CppExperts,
        "fuse": program.fuse,
        "cache_layout": CacheLayout(cache_layout.cache_shapes, dtypes.kernel_dtype, cache_layout.STORED),
        "paged_attention": attention.paged_attention,
        "write_kv": kv_cache_write.write_kv,
        "copy_blocks": block_copy.copy_blocks,
        "norm": norm.CppNorm,
        "embed": embedding.embed,
        "all_finite": linear.all_finite,
        "sampling": sampling.OPS,
    }
