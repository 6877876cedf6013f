"""The one place that decides which implementation of each op runs: chosen once, when a worker starts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import activation, block_copy, kv_cache_write, linear, norm, paged_attention, rotary


@dataclass(frozen=True, slots=True)
class BackEnd:
    """One implementation of every op, each with the signature of its module."""

    name: str
    linear: Callable[..., linear.PackedLinear]
    prepare_attention: Callable[..., paged_attention.AttentionPlan]
    paged_attention: Callable[..., Tensor]
    write_kv: Callable[..., None]
    copy_blocks: Callable[..., None]
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    layer_norm: Callable[..., tuple[Tensor, Tensor]]
    apply_rotary: Callable[..., tuple[Tensor, Tensor]]
    silu_and_mul: Callable[..., Tensor]
    gelu_tanh: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    relu: Callable[..., Tensor]


TORCH = BackEnd(
    name="torch",
    linear=linear.PackedLinear,
    prepare_attention=paged_attention.prepare,
    paged_attention=paged_attention.paged_attention,
    write_kv=kv_cache_write.write_kv,
    copy_blocks=block_copy.copy_blocks,
    rms_norm=norm.rms_norm,
    layer_norm=norm.layer_norm,
    apply_rotary=rotary.apply_rotary,
    silu_and_mul=activation.silu_and_mul,
    gelu_tanh=activation.gelu_tanh,
    gelu=activation.gelu,
    relu=activation.relu,
)
BACK_ENDS = {"torch": TORCH, "reference": TORCH}


def choose_back_end(device: torch.device, name: str = "auto") -> BackEnd:
    """Return the back end for `device`: the fastest one there, or the one named.

    Raises ConfigError for a name that is not known.
    """
    if name == "auto":
        return TORCH
    if name not in BACK_ENDS:
        raise ConfigError(f"back end must be auto or one of {', '.join(BACK_ENDS)}, got {name!r}")
    return BACK_ENDS[name]
