"""What Triton offers: the ops that differ from the PyTorch stand-ins."""

from typing import Any

from quire.kernels import philox
from quire.kernels.sampling import SamplingOps
from quire.kernels.triton import attention, block_copy, kv_cache_write, linear, norm, token_choice, token_records


def triton_ops() -> dict[str, Any]:
    """Return the ops of a back end by field."""
    return {
        "linear": linear.CudaLinear,
        "paged_attention": attention.paged_attention,
        "write_kv": kv_cache_write.write_kv,
        "rotate_and_write_kv": kv_cache_write.rotate_and_write_kv,
        "copy_blocks": block_copy.copy_blocks,
        "swap_blocks": block_copy.swap_blocks,
        "rms_norm": norm.TritonRMSNorm,
        "layer_norm": norm.TritonLayerNorm,
        "sampling": SamplingOps(
            argmax=token_choice.argmax,
            choose_tokens=token_choice.choose_tokens,
            uniforms=philox.uniforms,
            top_logprobs=token_records.top_logprobs,
            penalize=token_records.penalize,
        ),
    }
