"""The one place that decides which implementation of each op runs: chosen once, when a worker starts.

`torch` is the stand-in for the CPU: batched PyTorch, exact to the bit (docs/decisions/0002). `reference` is what tests
hold it against: the plainest form of each op. A further back end is one more `BackEnd` here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import activation, block_copy, kv_cache_write, linear, norm, paged_attention, rotary


@dataclass(frozen=True, slots=True)
class BackEnd:
    """One implementation of every op; each field has the signature of the function of its name in the op's module.

    `linear` makes a layer from a weight, as `linear.PackedLinear` does.
    """

    name: str
    linear: Callable[..., linear.Linear]
    prepare_attention: Callable[..., paged_attention.AttentionPlan]
    paged_attention: Callable[..., Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[list[Tensor], Tensor, Tensor], None]
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    layer_norm: Callable[..., tuple[Tensor, Tensor]]
    apply_rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    relu: Callable[[Tensor], Tensor]


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
REFERENCE = replace(
    TORCH,
    name="reference",
    linear=linear.PlainLinear,
    paged_attention=paged_attention.plain_paged_attention,
    write_kv=kv_cache_write.reference,
    copy_blocks=block_copy.reference,
)
BACK_ENDS = {back_end.name: back_end for back_end in (TORCH, REFERENCE)}


def choose_back_end(device: torch.device, name: str = "auto") -> BackEnd:
    """Return the back end for `device`: the fastest one there is for it, or the one named.

    Raises ConfigError for a device that is not supported yet and for a name that is not known.
    """
    if device.type != "cpu":
        raise ConfigError(f"device {device.type} is not supported yet, use cpu")
    if name == "auto":
        return TORCH
    if name not in BACK_ENDS:
        raise ConfigError(f"the back end must be auto, {' or '.join(BACK_ENDS)}, got {name!r}")
    return BACK_ENDS[name]
