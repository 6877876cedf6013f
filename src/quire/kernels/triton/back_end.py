"""Back end of Triton: the ops that differ from the PyTorch stand-ins."""

from functools import partial
from typing import Any

import torch

from quire.kernels import cache_layout, philox
from quire.kernels.sampling import SamplingOps
from quire.kernels.triton import (
    attention,
    block_copy,
    experts,
    few_rows,
    kv_cache_write,
    linear,
    logits,
    low_rank,
    norm,
    sampling,
)


def triton_ops(*, is_exact: bool = False) -> dict[str, Any]:
    """Return the ops of a back end by field. `is_exact`: a row's result does not depend on the other rows."""
    return {
        "linear": partial(linear.CudaLinear, is_exact=is_exact),
        "head": partial(linear.CudaLinear, dtype=torch.float32, is_exact=is_exact),
        "fuse": few_rows.fuse,
        "low_rank_up": low_rank.KeptUp,
        "adapter_slots": partial(low_rank.TritonSlots, is_exact=is_exact),
        "experts": experts.TritonExperts,
        "cache_layout": cache_layout.PLAIN,
        "paged_attention": partial(attention.paged_attention, is_exact=is_exact),
        "write_kv": kv_cache_write.write_kv,
        "copy_blocks": block_copy.copy_blocks,
        "norm": norm.TritonNorm,
        "sampling": SamplingOps(
            choose_tokens=sampling.choose_tokens,
            uniforms=philox.uniforms,
            top_logprobs=logits.top_logprobs,
            penalize=logits.penalize,
            mask_logits=logits.mask_logits,
        ),
    }
