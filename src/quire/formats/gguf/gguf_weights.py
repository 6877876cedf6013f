"""GGUF weight format: blocks of a file as integers or codes with scales, tensor by tensor of a type of its own.

Modules that are fused may be of several types (llama.cpp gives the value projection more bits): their elements become
8-bit integers in the smallest groups, with the same values, or floats where no such integers stand for the same values.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from quire.core.arrays import FLOAT16, Array
from quire.formats.gguf.blocks import BlockedTable, WeightBlocks
from quire.formats.gguf.gguf_checkpoint import GGUFCheckpoint
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_quantization import GGUFQuantization
from quire.kernels.linear_weight import CODEBOOK4, INT4, INT8, LinearWeight, Table
from quire.model.checkpoints.tensor_reader import TensorReader, require_tensor
from quire.model.quantization import Activations, Quantization, activation_group_size
from quire.model.weight_formats.float_formats import DenseFormat, read_floats, tensors_of_floats
from quire.model.weight_formats.weight_format import ModuleRows, StoredTensors

INT8_ZERO_POINT = 128


def open_gguf(
    file: GGUFFile, permuted: Mapping[str, int], raised: Collection[str], embedding: str, quantization: Quantization
) -> StoredTensors:
    """Return the tensors of a file; `permuted` and `raised` as of `GGUFCheckpoint`, `embedding` as of `GGUFFormat`."""
    checkpoint = GGUFCheckpoint(file, permuted, raised)
    if not isinstance(quantization, GGUFQuantization):
        return tensors_of_floats(checkpoint, quantization)
    return StoredTensors(checkpoint, GGUFFormat(checkpoint, embedding, quantization.activations))


class GGUFFormat:
    """A `WeightFormat` of GGUF files. `embedding`: the module of the embedding table, which a tied head shares."""

    def __init__(self, checkpoint: GGUFCheckpoint, embedding: str, activations: Activations | None = None) -> None:
        self._checkpoint = checkpoint
        self._embedding = embedding
        self._activations = activations

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as the parts of one; no tensor of a file is transposed."""
        assert not is_transposed
        if not all(map(self._is_quantized, modules)):
            return LinearWeight.dense([read_floats(tensors, each, width) for each in modules])
        parts = [self._blocks(tensors, each, width) for each in modules if each.start < each.stop]
        alike = _made_alike(parts)
        if alike is None:
            return LinearWeight.dense([read_floats(tensors, each, width) for each in modules])
        return self._stacked(alike, tensors)

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> BlockedTable | None:
        """Return an embedding table in blocks on a CPU, in float32 or bfloat16: in float16 a value may be infinite."""
        if not self._is_quantized(module) or not tensors.takes_stored_tables or tensors.dtype == FLOAT16:
            return None
        name = f"{module.module}.weight"
        require_tensor(self._checkpoint, name, (module.num_rows, width))
        tensors.names_read.add(name)
        return BlockedTable(self._checkpoint.kind(name), self._checkpoint.table(name), tensors.dtype)

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head; a tied one has the blocks of the embedding table."""
        if embedding is not None and f"{module.module}.weight" not in tensors.names:
            module = module._replace(module=self._embedding)
        if not self._is_quantized(module):
            return DenseFormat().read_head(tensors, module, width, embedding)
        return self._stacked([self._blocks(tensors, module, width)], tensors)

    def _is_quantized(self, module: ModuleRows) -> bool:
        name = f"{module.module}.weight"
        return name in self._checkpoint.names and self._checkpoint.is_quantized(name)

    def _blocks(self, tensors: TensorReader, module: ModuleRows, width: int) -> WeightBlocks:
        name = f"{module.module}.weight"
        require_tensor(self._checkpoint, name, (module.num_rows, width))
        tensors.names_read.add(name)
        return self._checkpoint.blocks(name, *module.rows)

    def _stacked(self, parts: list[WeightBlocks], tensors: TensorReader) -> LinearWeight:
        """Return blocks that are alike, but for their zero points, as one weight."""
        has_zeros = len({each.zero_point for each in parts}) > 1
        weights = [self._weight(each, tensors, zeros_as_array=has_zeros) for each in parts]
        return LinearWeight.stack(weights)

    def _weight(self, blocks: WeightBlocks, tensors: TensorReader, *, zeros_as_array: bool) -> LinearWeight:
        size, (num_rows, width) = blocks.group_size, blocks.elements.shape
        zeros: Array | int | None = blocks.zero_point if blocks.minimums is None else None
        if zeros_as_array:
            zeros = np.full_like(blocks.scales, blocks.zero_point, dtype=np.uint8)
        is_code = blocks.codebook is not None
        return LinearWeight(
            CODEBOOK4 if is_code else INT4 if blocks.bits == 4 else INT8,
            (blocks.elements,),
            num_rows,
            width,
            scales=blocks.scales,
            zero_points=None if is_code else zeros,
            group_size=size,
            activation_group_size=0 if is_code else activation_group_size(size, self._activations),
            minimums=blocks.minimums,
            codebook=None if blocks.codebook is None else np.array(blocks.codebook, np.float32),
            dtype=tensors.dtype,
        )


def _made_alike(parts: list[WeightBlocks]) -> list[WeightBlocks] | None:
    """Return blocks of the same values that differ in nothing but zero points, or None if there are none."""
    kinds = {(each.bits, each.group_size, each.zero_point, each.codebook, each.minimums is None) for each in parts}
    if len(kinds) == 1:
        return parts
    size = min(each.group_size for each in parts)
    wide = [_as_int8(each, size) for each in parts]
    if all(each.minimums is None for each in wide):
        return wide
    moved = [_with_minimums(each) for each in wide]
    is_same = all(np.array_equal(new.values(), old.values()) for new, old in zip(moved, wide, strict=True))
    return moved if is_same else None


def _as_int8(blocks: WeightBlocks, group_size: int) -> WeightBlocks:
    """Return 8-bit integers, or codes as such, in smaller groups."""
    times = blocks.group_size // group_size
    elements, zero_point = blocks.elements, blocks.zero_point
    if blocks.codebook is not None:
        codes = np.array(blocks.codebook) + INT8_ZERO_POINT
        elements, zero_point = codes.astype(np.uint8)[elements], INT8_ZERO_POINT
    return WeightBlocks(
        8,
        elements,
        blocks.scales.repeat(times, axis=1),
        zero_point,
        None if blocks.minimums is None else blocks.minimums.repeat(times, axis=1),
    )


def _with_minimums(blocks: WeightBlocks) -> WeightBlocks:
    """Return blocks with minimums in place of the zero point: the same values unless products overflow.

    Scales have 16 significant bits at most, as products of a float16 and an integer to 32, or 18 beside elements of 6
    bits, so that every product is exact.
    """
    if blocks.minimums is not None:
        return blocks
    with np.errstate(over="ignore"):
        minimums = blocks.scales * np.float32(blocks.zero_point)
    return blocks._replace(zero_point=0, minimums=minimums)
