"""Weights of GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write them.

`qweight` int32 [in / n, out] has n = 32 / bits inputs per word, `qzeros` int32 [groups, out / n] n outputs per word,
`scales` are [groups, out], `g_idx` int32 [in] is the group of each input. A value is scale * (q - zero); version 1
stores zero - 1, modulo the range of elements, version 2 the zero itself.
"""

from quire.formats.quantized.stored_weights import BITS, WORD_BITS, StoredModule, unpacked
from quire.kernels.linear_weight import LinearWeight


def read_gptq(module: StoredModule) -> LinearWeight:
    """Return a module's weight. Groups of inputs that are not consecutive have a group index."""
    bits, num_rows = BITS[module.scheme.element], module.rows.num_rows
    per_word = WORD_BITS // bits
    if module.width % per_word or num_rows % per_word:
        shape = [num_rows, module.width]
        raise module.tensors.error(module.name("qweight"), f"packs {per_word} elements per word, {shape} do not divide")
    words = module.read("qweight", (module.width // per_word, num_rows), "I32")[:, module.columns]
    zeros = module.read("qzeros", (module.num_groups, num_rows // per_word), "I32")
    zeros = (unpacked(zeros, bits, num_rows) + module.scheme.zero_offset) & ((1 << bits) - 1)
    return LinearWeight(
        module.scheme.element,
        (unpacked(words.T, bits, module.width),),
        module.num_outputs,
        module.width,
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.contiguous(),
        zero_points=module.zero_points(zeros.T),
        group_size=module.group_size,
        group_index=module.group_index("g_idx"),
        dtype=module.tensors.dtype,
    )
