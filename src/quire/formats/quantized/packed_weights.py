"""Packed weights of GPTQ, MXFP4 and AWQ, unpacked to the layout of the kernels.

GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it: `qweight` int32 [in / n, out] has n = 32 / bits inputs
per word, `qzeros` int32 [groups, out / n] n outputs per word, `scales` are [groups, out], `g_idx` int32 [in] is the
group of each input. A value is scale * (q - zero); version 1 stores zero - 1, modulo the range of elements, version 2
the zero itself.

MXFP4 (Rouhani et al. 2023), as gpt-oss stores it: `blocks` uint8 [out, in / 32, 16] have two e2m1 numbers in a byte,
the first in its low bits; `scales` uint8 [out, in / 32] are powers of two, with 127 added to the exponent. A value is
number * scale.

AWQ (Lin et al. 2024), as AutoAWQ writes it for its GEMM kernels: `qweight` int32 [in, out / 8] and `qzeros` int32
[groups, out / 8] have 8 outputs per word, in the order 0 2 4 6 1 3 5 7 from the low bits on; `scales` are
[groups, out]. A value is scale * (q - zero).
"""

import numpy as np

from quire.core.arrays import Array
from quire.formats.quantized.stored_weights import BITS, WORD_BITS, StoredModule, unpacked
from quire.kernels.linear_weight import CODEBOOK4, LinearWeight


def read_gptq(module: StoredModule) -> LinearWeight:
    """Return a module's weight. Groups of inputs that are not consecutive have a group index."""
    num_bits, num_rows = BITS[module.scheme.element], module.rows.num_rows
    per_word = WORD_BITS // num_bits
    if module.width % per_word or num_rows % per_word:
        shape = [num_rows, module.width]
        raise module.tensors.error(module.name("qweight"), f"packs {per_word} elements per word, {shape} do not divide")
    words = module.read("qweight", (module.width // per_word, num_rows), "I32")[:, module.columns]
    zeros = module.read("qzeros", (module.num_groups, num_rows // per_word), "I32")
    zeros = (unpacked(zeros, num_bits, num_rows) + module.scheme.zero_offset) & ((1 << num_bits) - 1)
    return LinearWeight(
        module.scheme.element,
        (unpacked(words.T, num_bits, module.width),),
        module.num_outputs,
        module.width,
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.copy(),
        zero_points=module.zero_points(zeros.T),
        group_size=module.group_size,
        group_index=module.group_index("g_idx"),
        dtype=module.tensors.dtype,
    )


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_mxfp4(module: StoredModule) -> LinearWeight:
    """Return a module's weight. ModelError for inputs that are no whole blocks, or scales that are no weights'."""
    num_rows, width, size = module.rows.num_rows, module.width, module.group_size
    if width % size:
        raise module.tensors.error(module.name("blocks"), f"has blocks of {size} inputs, {width} do not divide")
    blocks = module.read("blocks", (num_rows, width // size, size // 2), "U8", module.rows.rows)
    elements = unpacked(np.ascontiguousarray(blocks.reshape(module.num_outputs, -1)).view(np.int32), 4, width)
    return LinearWeight(
        CODEBOOK4,
        (elements,),
        module.num_outputs,
        width,
        scales=_scales(module),
        group_size=size,
        codebook=np.array([*E2M1, *(-number for number in E2M1)], np.float32),
        dtype=module.tensors.dtype,
    )


def _scales(module: StoredModule) -> Array:
    shape = module.rows.num_rows, module.num_groups
    return module.powers("scales", module.read("scales", shape, "U8", module.rows.rows))


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
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.copy(),
        zero_points=module.zero_points(_outputs(zeros)),
        group_size=module.group_size,
        dtype=module.tensors.dtype,
    )


def _outputs(words: Array) -> Array:
    """Return uint8 [outputs, n] of words [n, outputs / 8]."""
    num_inputs, num_words = words.shape
    octets = np.ascontiguousarray(words.T).view(np.uint8).reshape(num_words, num_inputs, 4)
    outputs = np.empty((num_words, PER_WORD, num_inputs), np.uint8)
    for number, place in enumerate(PLACES):
        octet = octets[:, :, place // 2]
        outputs[:, number] = octet >> 4 if place % 2 else octet & 15
    return outputs.reshape(-1, num_inputs)
