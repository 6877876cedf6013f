"""Random valid blocks of every quantized GGUF type, as rows of bytes and as tensors of a file."""

import re

import numpy as np
from torch import Tensor

from quire.formats.gguf.gguf_file import GGML_TYPES
from support.gguf_files import Quantize, Stored, as_is

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
HALVES = {  # places of float16 numbers in a block
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_rows(
    name: str, num_rows: int, width: int, seed: int = 0, *, least: int = -7, most: int = 4
) -> np.ndarray:
    """Return rows of random bytes with finite scales of any sign, of magnitudes 10 ** least to 10 ** most."""
    kind, random = KINDS[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows * width // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for place in HALVES[name]:
        scales = random.standard_normal(len(blocks)) * 10.0 ** random.integers(least, most, len(blocks))
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = np.clip(128 + random.integers(3 * least, 3 * most, len(blocks)), 0, 250)
    return blocks.reshape(num_rows, -1)


def random_blocks(kinds: dict[str, str], default: str) -> Quantize:
    """Return a `Quantize` that stores random blocks for every matrix: of the type of its name's end, or the default."""

    def quantize(name: str, tensor: Tensor) -> Stored:
        if tensor.dim() == 1 or name.endswith("_norm.weight"):
            return as_is(name, tensor)
        if any(part in name for part in (".ffn_gate_inp", ".shortconv.conv", ".ssm_conv1d", ".ssm_a", ".ssm_d")):
            # routers and convolutions stay floats
            return as_is(name, tensor.float())
        stem = re.sub(r"\.\d+\.weight$", ".weight", name)  # weights of all experts
        kind = next((kind for end, kind in kinds.items() if stem.endswith(end)), default)
        if kind == "BF16":
            return as_is(name, tensor.bfloat16())
        rows = random_rows(kind, *tensor.shape, seed=sum(name.encode()), least=-4, most=-2)
        return kind, tuple(tensor.shape), rows.tobytes()

    return quantize
