"""Weights of AWQ (Lin et al. 2024), as AutoAWQ writes them for its GEMM kernels.

`qweight` int32 [in, out / 8] and `qzeros` int32 [groups, out / 8] have 8 outputs per word, in the order 0 2 4 6 1 3 5 7
from the low bits on; `scales` are [groups, out]. A value is scale * (q - zero).
"""

import torch
from torch import Tensor

from quire.formats.quantized.stored_weights import StoredModule
from quire.kernels.linear_weight import LinearWeight

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each of a word's outputs


def read_awq(module: StoredModule) -> LinearWeight:
    """Return a module's weight."""
    start, stop, num_rows = *module.rows.rows, module.rows.num_rows
    if num_rows % PER_WORD:
        raise module.tensors.error(
            module.name("qweight"), f"packs {PER_WORD} outputs per word, {num_rows} do not divide"
        )
    words = module.read("qweight", (module.width, num_rows // PER_WORD), "I32")
    zeros = module.read("qzeros", (module.num_groups, num_rows // PER_WORD), "I32")
    return LinearWeight(
        module.scheme.element,
        (_outputs(words[:, start // PER_WORD : stop // PER_WORD]),),
        module.num_outputs,
        module.width,
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.contiguous(),
        zero_points=module.zero_points(_outputs(zeros)),
        group_size=module.group_size,
        dtype=module.tensors.dtype,
    )


def _outputs(words: Tensor) -> Tensor:
    """Return uint8 [outputs, n] of words [n, outputs / 8]."""
    num_inputs, num_words = words.shape
    octets = words.T.contiguous().flatten().view(torch.uint8).view(num_words, num_inputs, 4)
    outputs = octets.new_empty(num_words, PER_WORD, num_inputs)
    for number, place in enumerate(PLACES):
        octet = octets[:, :, place // 2]
        outputs[:, number] = octet >> 4 if place % 2 else octet & 15
    return outputs.flatten(0, 1)
