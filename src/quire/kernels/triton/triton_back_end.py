"""Back end of Triton: the ops that differ from the PyTorch stand-ins."""

from functools import partial
from typing import Any

import torch

from quire.kernels.reference import sampling
from quire.kernels.reference.kv_cache import PLAIN
from quire.kernels.sampling import SamplingOps, uniforms
from quire.kernels.triton import (
    few_rows,
    triton_attention,
    triton_block_copy,
    triton_experts,
    triton_kv_cache_write,
    triton_linear,
    triton_logits,
    triton_low_rank,
    triton_norm,
    triton_sampling,
)


def triton_ops(*, is_exact: bool = False) -> dict[str, Any]:
    """Return the ops of a back end by field. `is_exact`: a row's result does not depend on the other rows."""
    return {
        "linear": partial(triton_linear.CudaLinear, is_exact=is_exact),
        "head": partial(triton_linear.CudaLinear, dtype=torch.float32, is_exact=is_exact),
        "fuse": few_rows.fuse,
        "low_rank_up": triton_low_rank.KeptUp,
        "adapter_slots": partial(triton_low_rank.TritonSlots, is_exact=is_exact),
        "experts": triton_experts.TritonExperts,
        "cache_layout": PLAIN,
        "paged_attention": partial(triton_attention.paged_attention, is_exact=is_exact),
        "write_kv": triton_kv_cache_write.write_kv,
        "copy_blocks": triton_block_copy.copy_blocks,
        "norm": triton_norm.TritonNorm,
        "sampling": SamplingOps(
            choose_tokens=triton_sampling.choose_tokens,
            uniforms=uniforms,
            top_logprobs=triton_logits.top_logprobs,
            penalize=triton_logits.penalize,
            mask_logits=triton_logits.mask_logits,
            keep_tokens=sampling.keep_tokens,
            forbid_tokens=sampling.forbid_tokens,
            forbid_while_any_is_left=sampling.forbid_while_any_is_left,
            add_bias=sampling.add_bias,
        ),
    }
