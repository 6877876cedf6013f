"""Weights in MXFP4 (Rouhani et al. 2023), as gpt-oss stores them.

`blocks` uint8 [out, in / 32, 16] have two e2m1 numbers in a byte, the first in its low bits; `scales` uint8
[out, in / 32] are powers of two, with 127 added to the exponent. A value is number * scale.
"""

import torch
from torch import Tensor

from quire.formats.quantized.stored_weights import StoredModule, unpacked
from quire.kernels.linear_weight import CODEBOOK4, LinearWeight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_mxfp4(module: StoredModule) -> LinearWeight:
    """Return a module's weight. ModelError for inputs that are no whole blocks, or scales that are no weights'."""
    num_rows, width, size = module.rows.num_rows, module.width, module.group_size
    if width % size:
        raise module.tensors.error(module.name("blocks"), f"has blocks of {size} inputs, {width} do not divide")
    blocks = module.read("blocks", (num_rows, width // size, size // 2), "U8", module.rows.rows)
    elements = unpacked(blocks.reshape(module.num_outputs, -1).contiguous().view(torch.int32), 4, width)
    return LinearWeight(
        CODEBOOK4,
        (elements,),
        module.num_outputs,
        width,
        scales=_scales(module),
        group_size=size,
        codebook=torch.tensor([*E2M1, *(-number for number in E2M1)], device=elements.device),
        dtype=module.tensors.dtype,
    )


def _scales(module: StoredModule) -> Tensor:
    shape = module.rows.num_rows, module.num_groups
    return module.powers("scales", module.read("scales", shape, "U8", module.rows.rows))
