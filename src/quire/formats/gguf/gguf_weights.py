"""Weights of a GGUF file: the schemes of its tensors' types, blocks as codes with scales, and plain tensors.

Modules that are fused may be of several types (llama.cpp gives the value projection more bits): their elements become
8-bit integers in the smallest groups, with the same values, or floats where no such integers stand for the same values.

Activations of integers are rounded to int8 in the groups of their blocks, 16 or 32 inputs, unless bfloat16 is asked
for; codes are expanded as they are used.

Pages that were read count as this process's memory while they are mapped, so they are dropped every so often.
"""

import math
import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from quire.core.arrays import FLOAT16, FLOAT32, STORED_DTYPES, UINT8, Array, empty
from quire.core.errors import ConfigError, ModelError
from quire.formats.gguf.blocks import (
    KINDS,
    BlockedTable,
    WeightBlocks,
    copy_blocks,
    empty_blocks,
    read_blocks,
    read_values,
)
from quire.formats.gguf.gguf_file import GGUFFile
from quire.kernels.conversion import converted
from quire.kernels.linear_weight import CODEBOOK4, INT4, INT8, STRIP_ROWS, LinearWeight, Table, WeightPortions
from quire.model.checkpoints.tensor_reader import FLOAT_DTYPES, Checkpoint, TensorReader, require_tensor
from quire.model.quantization import (
    Activations,
    Quantization,
    QuantizationOptions,
    TableBlocks,
    WeightScheme,
    activation_group_size,
    resolve,
)
from quire.model.spec import DecoderSpec
from quire.model.weight_format import DenseFormat, ModuleRows, StoredTensors, read_floats, tensors_of_floats

GGUF = "gguf"
SCHEMES = {
    "Q4_0": WeightScheme("int4", 32),
    "Q4_1": WeightScheme("int4", 32, correction="minimums"),
    "Q5_0": WeightScheme("int8", 32),
    "Q5_1": WeightScheme("int8", 32, correction="minimums"),
    "Q8_0": WeightScheme("int8", 32),
    "Q4_K": WeightScheme("int4", 32, correction="minimums"),
    "Q5_K": WeightScheme("int8", 32, correction="minimums"),
    "Q6_K": WeightScheme("int8", 16),
    "IQ4_NL": WeightScheme("codebook4", 32),
    "IQ4_XS": WeightScheme("codebook4", 32),
    "MXFP4": WeightScheme("codebook4", 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFQuantization(Quantization):
    """A `Quantization` with a scheme for each module that a file has."""

    modules: Mapping[str, WeightScheme]
    activations: Activations | None = None  # asked for; None: the default for each module

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules are fused to."""
        schemes = {self.modules.get(module, WeightScheme()) for module in modules}
        return schemes.pop() if len(schemes) == 1 else _fused(schemes, self.activations)


def gguf_quantization(file: GGUFFile, spec: DecoderSpec, asked: QuantizationOptions) -> Quantization:
    """Return the quantization of a file: of layers the scheme with most elements, and of the head its own.

    A file of floats may be quantized while it is loaded. Raises ConfigError for options that contradict the file.
    """
    names = spec.weights
    head = f"{names.head}.weight" if f"{names.head}.weight" in file.tensors else f"{names.embedding}.weight"
    counts: Counter[str] = Counter()
    for name, entry in file.tensors.items():
        tables = names.embedding, names.positions, names.layer_table
        if len(entry.shape) > 1 and name != head and name.split(".")[0] not in tables:
            counts[entry.type.name] += math.prod(entry.shape)
    head_kind = file.tensors[head].type.name
    found = [kind for kind, _ in counts.most_common() if kind in SCHEMES]
    if not found and head_kind not in SCHEMES:
        method = None if asked.method == GGUF else asked.method
        return resolve(QuantizationOptions(method, asked.group_size, asked.activations), str(file.path))
    kinds = ", ".join(dict.fromkeys([*found, *([head_kind] if head_kind in SCHEMES else [])]))
    if asked.method not in (None, GGUF):
        raise ConfigError(f"quantization {asked.method!r} contradicts {file.path}, which is quantized to {kinds}")
    layers = block_scheme(counts.most_common(1)[0][0] if counts else "F32", asked.activations)
    of_head = block_scheme(head_kind, asked.activations)
    modules = {
        name.removesuffix(".weight"): block_scheme(entry.type.name, asked.activations)
        for name, entry in file.tensors.items()
        if name.endswith(".weight")
    }
    return GGUFQuantization(
        f"{GGUF} ({kinds})", layers, of_head, modules=modules, activations=asked.activations,
        table=_table_blocks(file, names.embedding), layer_table=_table_blocks(file, names.layer_table),
    )  # fmt: skip


def _table_blocks(file: GGUFFile, module: str | None) -> TableBlocks | None:
    """Return the blocks of a table; None: it is of floats, or there is none."""
    entry = file.tensors.get(f"{module}.weight")
    if entry is None or entry.type.name not in SCHEMES:
        return None
    return TableBlocks(entry.type.block_size, entry.type.block_bytes)


def block_scheme(kind: str, activations: Activations | None) -> WeightScheme:
    """Return the scheme of tensors of a type; dense for types of floats."""
    stored = SCHEMES.get(kind, WeightScheme())
    if stored.format not in ("int8", "int4"):
        return stored
    group = activation_group_size(stored.group_size, activations)
    return WeightScheme(stored.format, stored.group_size, group, stored.correction)


def _fused(schemes: Collection[WeightScheme], activations: Activations | None) -> WeightScheme:
    """Return the scheme of blocks of several types as one layer: 8-bit integers in the smallest groups, or dense."""
    if any(scheme.format == "dense" for scheme in schemes):
        return WeightScheme()
    group_size = min(scheme.group_size for scheme in schemes)
    has_minimums = any(scheme.correction == "minimums" for scheme in schemes)
    correction = "minimums" if has_minimums else "zeros"
    return WeightScheme("int8", group_size, activation_group_size(group_size, activations), correction)


RESIDENT_BYTES = 64 << 20     # read before pages are dropped
PORTION_BYTES = 16 << 20      # blocks read at a time
ELEMENTS_AT_ONCE = 1 << 23    # read and packed at a time: some for each thread

_DTYPES = {name: STORED_DTYPES[name] for name in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")}


class GGUFCheckpoint:
    """A `Checkpoint` of a file. `permuted`: tensors with permuted heads, and the dimensions of a head of each.

    `raised`: tensors that are stored plus 1. They, and quantized ones, read as float32.
    """

    def __init__(self, file: GGUFFile, permuted: Mapping[str, int], raised: Collection[str] = ()) -> None:
        self._file = file
        self._permuted, self._raised = permuted, frozenset(raised)
        self._bytes_read = 0

    def kind(self, name: str) -> str:
        """Return the type of a tensor's elements or blocks, by ggml's names."""
        return self._file.tensors[name].type.name

    @property
    def names(self) -> Collection[str]:
        return self._file.tensors.keys()

    def location(self, name: str | None = None) -> str:
        return str(self._file.path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._file.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of what `read` returns."""
        kind = self._file.tensors[name].type.name
        return "F32" if self.is_quantized(name) or (name in self._raised and kind in FLOAT_DTYPES) else kind

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored in blocks. ModelError if they are of a type that is not read."""
        kind = self._file.tensors[name].type.name
        if kind not in KINDS and kind not in _DTYPES:
            raise self._file.error(f"tensor {name} has type {kind}, which is not supported; supported are "
                                   f"{', '.join([*_DTYPES, *KINDS])}")
        return kind in KINDS

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor: whole ones that are not quantized in the file's memory."""
        stored = self._stored(name, start, stop)
        return converted(stored, FLOAT32) - 1 if name in self._raised else stored

    def _stored(self, name: str, start: int, stop: int) -> Array:
        entry = self._file.tensors[name]
        if not self.is_quantized(name):
            return self._bytes(name, start, stop).view(_DTYPES[entry.type.name]).reshape(-1, *entry.shape[1:])
        if len(entry.shape) == 1:  # all of it is one row of blocks
            return read_values(entry.type.name, self._bytes(name, 0, 1)).ravel()[start:stop]
        portions = self._portions(name, start, stop)
        found = [read_values(entry.type.name, self._bytes(name, *each)) for each in portions]
        values = found[0] if len(found) == 1 else np.concatenate(found)
        return values.reshape(-1, *entry.shape[1:])

    def blocks(self, name: str, start: int, stop: int) -> WeightBlocks:
        """Return rows [start, stop) of a quantized matrix, at least one, as elements and scales.

        Raises ModelError if a value is NaN or infinite in float32.
        """
        entry = self._file.tensors[name]
        whole = empty_blocks(entry.type.name, stop - start, prod(entry.shape[1:]))
        for first, last in self._portions(name, start, stop):
            rows = self._bytes(name, first, last)
            if not read_blocks(entry.type.name, rows, whole.rows(first - start, last - start)):
                raise self._not_finite(name)
        return whole

    def portions(self, name: str) -> Iterator[WeightBlocks]:
        """Yield rows of a quantized matrix, always in the same memory, so that the system need not clear more.

        Raises ModelError if a value is NaN or infinite in float32.
        """
        entry = self._file.tensors[name]
        num_rows, width = entry.shape[0], prod(entry.shape[1:])
        num_at_once = max(ELEMENTS_AT_ONCE // width // STRIP_ROWS, 1) * STRIP_ROWS
        memory = empty_blocks(entry.type.name, min(num_at_once, num_rows), width)
        for first in range(0, num_rows, num_at_once):
            some = memory.rows(0, min(num_at_once, num_rows - first))
            if not read_blocks(entry.type.name, self._bytes(name, first, min(first + num_at_once, num_rows)), some):
                raise self._not_finite(name)
            yield some

    def table(self, name: str) -> Array:
        """Return the bytes of a quantized matrix in memory of their own, uint8 [num_rows, bytes_per_row].

        Raises ModelError if a value is NaN or infinite in float32.
        """
        entry = self._file.tensors[name]
        num_rows = entry.shape[0]
        whole = empty((num_rows, entry.num_bytes // num_rows), UINT8)
        for first, last in self._portions(name, 0, num_rows):
            if not copy_blocks(entry.type.name, self._bytes(name, first, last), whole[first:last]):
                raise self._not_finite(name)
        return whole

    def _not_finite(self, name: str) -> ModelError:
        return self._file.error(f"tensor {name} has values that are NaN or infinite")

    def _portions(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows [start, stop) of a matrix in parts; their pages may be dropped in between."""
        entry = self._file.tensors[name]
        num_rows = max(PORTION_BYTES * entry.shape[0] // entry.num_bytes, 1)
        return [(first, min(first + num_rows, stop)) for first in range(start, stop, num_rows)]

    def _bytes(self, name: str, start: int, stop: int) -> Array:
        """Return the bytes of some rows, uint8 [num_rows, bytes_per_row]."""
        entry = self._file.tensors[name]
        num_rows = entry.shape[0] if len(entry.shape) > 1 or not self.is_quantized(name) else 1
        self._drop_pages(entry.num_bytes // num_rows * (stop - start))
        rows = np.frombuffer(self._file.map, np.uint8, entry.num_bytes, entry.offset).reshape(num_rows, -1)
        if name not in self._permuted:
            return rows[start:stop]
        return rows[stored_rows(np.arange(start, stop), self._permuted[name])]

    def _drop_pages(self, num_bytes: int) -> None:
        """Count bytes that are about to be read; let the pages of earlier ones go if they are many."""
        self._bytes_read += num_bytes
        if self._bytes_read > RESIDENT_BYTES:
            self._file.map.madvise(mmap.MADV_DONTNEED)
            self._bytes_read = num_bytes


class TwoFiles:
    """A `Checkpoint` of the tensors of a model and, under other names, of its encoder of images."""

    def __init__(self, model: Checkpoint, encoder: Checkpoint) -> None:
        self._owners = dict.fromkeys(encoder.names, encoder) | dict.fromkeys(model.names, model)
        self._place = f"{model.location()} and {encoder.location()}"

    @property
    def names(self) -> Collection[str]:
        return self._owners.keys()

    def location(self, name: str | None = None) -> str:
        """Return the file of a tensor, or without a name both."""
        return self._place if name is None else self._owners[name].location(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._owners[name].shape(name)

    def dtype(self, name: str) -> str:
        """Return the dtype of what `read` returns."""
        return self._owners[name].dtype(name)

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor."""
        return self._owners[name].read(name, start, stop)


def stored_rows(rows: Array, head_dim: int) -> Array:
    """Return where the rows of heads of `head_dim` dimensions are stored, given as Hugging Face counts them.

    llama.cpp stores dimension i of the first half of a head at 2 i, dimension i of the second half at 2 i + 1.
    """
    dimension, half = rows % head_dim, head_dim // 2
    stored: Array = rows - dimension + 2 * (dimension % half) + dimension // half
    return stored


INT8_ZERO_POINT = 128


def open_gguf(
    file: GGUFFile, permuted: Mapping[str, int], raised: Collection[str], embedding: str, quantization: Quantization
) -> StoredTensors:
    """Return the tensors of a file; `permuted` and `raised` as in `GGUFCheckpoint`, `embedding` as in `GGUFFormat`."""
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

    def tied_weight(
        self, tensors: TensorReader, module: ModuleRows, width: int
    ) -> Callable[[], LinearWeight | WeightPortions] | None:
        """Return what reads the table; of blocks a portion at a time."""
        if not self._is_quantized(module):
            return DenseFormat().tied_weight(tensors, module, width)
        if tensors.dtype == FLOAT16:
            return None
        return partial(self._portions, tensors, module, width)

    def _portions(self, tensors: TensorReader, module: ModuleRows, width: int) -> WeightPortions:
        name = f"{module.module}.weight"
        require_tensor(self._checkpoint, name, (module.num_rows, width))
        tensors.names_read.add(name)
        found = (self._stacked([each], tensors) for each in self._checkpoint.portions(name))
        return WeightPortions(module.num_rows, found)

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
