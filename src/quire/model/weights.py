"""Weight reader: a family's tensors out of a checkpoint, fused, converted and packed, module by module."""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import FLOAT32, MODEL_DTYPES, Array, DType, concatenated
from quire.core.errors import ConfigError
from quire.kernels import tensors
from quire.kernels.back_end import BackEnd
from quire.kernels.conversion import converted, expand
from quire.kernels.kv_cache import KVScales
from quire.kernels.layers import Expert, ExpertLayer, ExpertSplit, Linear, Routing
from quire.kernels.linear_weight import DENSE, LinearWeight, StoredTable, Table, WeightPortions
from quire.kernels.tensors import Tensor
from quire.model.checkpoints.tensor_reader import Checkpoint, TensorReader, with_single_experts
from quire.model.shapes import ExpertShapes, LinearShape, NormShape, TableShape, VectorShape
from quire.model.sharding import Range, shifted
from quire.model.spec import Rotary, WeightMap
from quire.model.weight_format import DenseFormat, ModuleRows, RoundedFormat, WeightFormat, vision_format

log = logging.getLogger(__name__)

MAX_NAMES_IN_WARNING = 5
ROWS_AT_ONCE = 1024  # rows of tables that are compared in one portion
SMALLEST_KV_SCALE = 1e-20


@dataclass(slots=True)
class ReadTally:
    """Parameters and bytes read so far; shared by a reader and its layers.

    `kept`: on the host, what is computed with, in the order in which it was read. `frequencies`: of rotary tables.
    """

    num_parameters: int = 0
    weight_bytes: int = 0  # as kept in memory
    table_bytes: int = 0   # part of them: a table of embeddings that is no head
    kept: list[Linear | StoredTable | Array] = field(default_factory=list)
    frequencies: dict[Rotary, Array] = field(default_factory=dict)


class TokenTable(NamedTuple):
    """The table of token embeddings: as read, and as the back end looks rows up in it, on a CPU in the same memory.

    `head`: the layer to logits, if rows are looked up in its weight.
    """

    stored: Table
    taken: Table
    head: Linear | None = None


class WeightReader:
    """Reader of modules by the names of the family's map. Every failure is a ModelError that names the tensor.

    Formats read arrays; the back end gets them as tensors on its device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: WeightMap,
        back_end: BackEnd,
        dtype: str,
        device: object,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self.names = names
        self.back_end = back_end
        self._library = back_end.library
        self.dtype = self._library.dtype(dtype)
        self.device = self._library.device(device)
        self.tally = ReadTally()
        checkpoint = with_single_experts(checkpoint, names)
        is_on_host = str(self.device) == "cpu"
        self._tensors = TensorReader(checkpoint, MODEL_DTYPES[dtype], takes_stored_tables=is_on_host)
        self._format = weight_format or DenseFormat()
        self._prefix = self._find_prefix()

    def layer(self, index: int) -> "WeightReader":
        """Return a reader of the modules of one layer."""
        scoped = copy.copy(self)
        scoped._prefix = self._prefix + self.names.layer.format(layer=index)
        return scoped

    def unprefixed(self) -> "WeightReader":
        """Return a reader of modules that are not below the prefix."""
        scoped = copy.copy(self)
        scoped._prefix = ""
        return scoped

    def below(
        self, prefixes: Sequence[str], module: str, names: WeightMap | None = None, *, is_vision: bool = True
    ) -> "WeightReader":
        """Return a reader of a part, below the first prefix under which the checkpoint has `module`.

        names: of its layers, where it has some. `is_vision`: an encoder of images, with its own format.
        """
        scoped, found = copy.copy(self), (each for each in prefixes if f"{each}{module}.weight" in self._tensors.names)
        scoped.names, scoped._prefix = names or self.names, next(found, prefixes[0])
        scoped._format = vision_format(self._format) if is_vision else self._format
        return scoped

    def table(self, shape: TableShape) -> Tensor:
        """Return a table of floats [num_rows, width]."""
        return self.taken(self._read_table(shape))

    def _read_table(self, shape: TableShape) -> Array:
        return self._read_kept([f"{self._prefix}{shape.module}.weight"], [(shape.num_rows, shape.width)])

    def embedding(self, shape: TableShape, tied_head: LinearShape | None = None) -> TokenTable:
        """Return the table of token embeddings [num_rows, width]: of floats, or as the checkpoint stores it.

        `tied_head`: of a head that has the table's values. Where both have the same ones, the table is the head's
        weight.
        """
        head = None if tied_head is None else self._shared_head(shape, tied_head)
        if head is not None:
            table = head.table  # type: ignore[attr-defined]
            return TokenTable(table, table, head)
        return self.token_table(shape)

    def token_table(self, shape: TableShape) -> TokenTable:
        """Return a table with a row for each token, of floats or as the checkpoint stores it."""
        module = ModuleRows.whole(f"{self._prefix}{shape.module}", shape.num_rows)
        stored = self._format.read_table(self._tensors, module, shape.width)
        if stored is None:
            table = self._read_table(shape)
            self.tally.table_bytes = table.nbytes
            return TokenTable(table, self.taken(table))
        self.tally.num_parameters += shape.num_rows * shape.width
        self.tally.weight_bytes += stored.num_bytes
        self.tally.table_bytes = stored.num_bytes
        self._keep(stored)
        return TokenTable(stored, self._library.table(stored))

    def has_values_of(self, table: Table, shape: TableShape) -> bool:
        """Return whether a table of the checkpoint has the values of another one of floats; nothing is kept."""
        name, whole = f"{self._prefix}{shape.module}.weight", (shape.num_rows, shape.width)
        if not isinstance(table, np.ndarray) or table.shape != whole or name not in self._tensors.names:
            return False
        portions = ((first, min(first + ROWS_AT_ONCE, len(table))) for first in range(0, len(table), ROWS_AT_ONCE))
        return all(np.array_equal(self._tensors.floats(name, whole, rows), table[slice(*rows)]) for rows in portions)

    def _shared_head(self, shape: TableShape, head: LinearShape) -> Linear | None:
        """Return the layer of a tied head, with the table of embeddings as its weight; None: each has its own."""
        own_tensors = tuple(f"{stem}." for stem in (head.modules[0], *self.names.other_heads))
        is_table = self.back_end.has_tables and (head.num_rows, head.width) == ((shape.num_rows,), shape.width)
        if not is_table or head.has_bias or any(name.startswith(own_tensors) for name in self._tensors.names):
            return None
        module = ModuleRows.whole(f"{self._prefix}{shape.module}", shape.num_rows)
        read = self._format.tied_weight(self._tensors, module, shape.width)
        return None if read is None else self._made_head(head, read)

    def _made_head(self, shape: LinearShape, read: Callable[[], LinearWeight | WeightPortions]) -> Linear:
        layer = self.back_end.head(read(), None)
        self._tally_layer(layer, shape.num_rows[0] * shape.width)
        return layer

    def norm(self, shape: NormShape, heads: Range | None = None) -> tuple[Tensor, Tensor | None]:
        """Return a norm's weight, [width] or [num_heads, width], and, if it has one, its bias.

        heads: those to keep the weights of; None: all.
        """

        def read(part: str) -> Array:
            found = {self._prefix + name: size for name, size in shape.tensors.items() if name.endswith(part)}
            return self._read_kept(list(found), list(found.values())).reshape(shape.weight_shape)

        dtype = self._tensors.dtype
        weight = read(".weight") if shape.has_weight else converted(np.ones(shape.width, np.float32), dtype)
        if shape.num_heads and heads is not None:
            weight = weight[slice(*heads)].copy()
        return self.taken(weight), self.taken(read(".bias")) if shape.has_bias else None

    def vector(self, shape: VectorShape, *others: VectorShape, ranges: Sequence[Range] | None = None) -> Tensor:
        """Return a vector of a layer, [length] float32; or some of its elements, one range after the other.

        `others`: tensors with the rest of it. They may be cut elsewhere: transformers 5 writes parts of equal size.
        """
        names, sizes = zip(*((self._prefix + each.name, each.stored) for each in (shape, *others)), strict=True)
        if others and all(name in self._tensors.names for name in names):
            found = [self._tensors.shape(name) for name in names]
            is_whole = sum(each[0] for each in found if each) == sum(size[0] for size in sizes)
            if is_whole and {each[1:] for each in found} == {shape.stored[1:]}:
                sizes = tuple(found)
        whole = self._read_kept(list(names), list(sizes), FLOAT32).ravel()
        return self.taken(whole if ranges is None else concatenated([whole[slice(*each)] for each in ranges]))

    def linear(
        self,
        shape: LinearShape,
        ranges: Sequence[Range] | None = None,
        *,
        dtype: tensors.DType | None = None,
        weight_format: WeightFormat | None = None,
    ) -> Linear:
        """Return one layer, the modules' rows on top of each other.

        ranges: the rows [start, stop) of each of `shape.num_rows` that are read; None: all. dtype: of its results;
        None: the model's. `weight_format`: None is the checkpoint's.
        """
        modules = self._module_rows(shape, ranges)
        weight_format = weight_format or self._format
        weight = weight_format.read(self._tensors, modules, shape.width, is_transposed=self.names.is_transposed)
        order = row_order(shape, ranges)
        weight = weight if order is None else weight.take(order)
        bias = self._read_biases(modules, order) if shape.has_bias else None
        layer = self.back_end.linear(
            self._library.weight(weight, self.device), self._taken_bias(bias), dtype=dtype,
            activation=shape.activation or "none",
        )  # fmt: skip
        num_rows = shape.num_rows if ranges is None else [stop - start for start, stop in ranges]
        self._tally_layer(layer, sum(num_rows) * shape.width)
        return layer

    def dense_linear(self, shape: LinearShape, ranges: Sequence[Range] | None = None) -> Linear:
        """Return a layer of floats, whatever the checkpoint's format; a quantized weight is expanded.

        ranges: as in `linear`.
        """
        weight = LinearWeight.dense(converted(self._expanded(shape), self._tensors.dtype))
        order = row_order(shape, ranges)
        if order is None and ranges is not None:
            order = np.concatenate([np.arange(*rows) for rows in shifted(ranges, shape.num_rows)])
        weight = weight if order is None else weight.take(order)
        layer = self.back_end.linear(self._library.weight(weight, self.device), None)
        self._tally_layer(layer, weight.out_features * shape.width)
        return layer

    def latent_heads(self, shape: LinearShape, num_heads: int, heads: Range) -> tuple[list[Linear], list[Linear]]:
        """Return the layers of some heads between a part of queries and the latent, and from the latent to values.

        `shape`: those from the latent to the keys and values of all heads, which are of floats here: keys' layers are
        transposed. A quantized checkpoint's are expanded.
        """
        dtype, library, num_latent = self._tensors.dtype, self._library, shape.width
        if len(shape.modules) == 1:
            values = self._expanded(shape).reshape(num_heads, -1, num_latent)
            num_key_rows = shape.num_rows[0] // num_heads
            keys, values = values[:, :num_key_rows].transpose(0, 2, 1), values[:, num_key_rows:]
        else:
            key_rows, value_rows = (count // num_heads for count in shape.num_rows)
            shapes = (num_heads, num_latent, key_rows), (num_heads, value_rows, num_latent)
            names = (f"{self._prefix}{module}.weight" for module in shape.modules)
            keys, values = (self._tensors.floats(name, each) for name, each in zip(names, shapes, strict=True))

        def layers(weights: Array) -> list[Linear]:
            own = (converted(np.ascontiguousarray(each), dtype) for each in weights[slice(*heads)])
            made = [self.back_end.linear(library.weight(LinearWeight.dense(each), self.device), None) for each in own]
            for layer in made:
                self._tally_layer(layer, weights[0].size)
            return made

        return layers(keys), layers(values)

    def _expanded(self, shape: LinearShape) -> Array:
        """Return modules' weights as floats [rows, width], in the order of the checkpoint."""
        weight_format = DenseFormat() if isinstance(self._format, RoundedFormat) else self._format
        modules = self._module_rows(shape, None)
        return expand(weight_format.read(self._tensors, modules, shape.width, is_transposed=self.names.is_transposed))

    def partial_linear(
        self, shape: LinearShape, inputs: Callable[[int], Range], *, dtype: tensors.DType | None, has_bias: bool
    ) -> tuple[Linear, Range]:
        """Return the layer of some inputs, and these inputs. dtype as in `linear`; `has_bias`: with the shape's bias.

        `inputs` is called with the number of inputs at multiples of which the weight can be cut. Tensors are read, and
        quantized, whole. Raises ConfigError for inputs that cut groups with one scale.
        """
        modules = self._module_rows(shape, None)
        weight = self._format.read(self._tensors, modules, shape.width, is_transposed=self.names.is_transposed)
        name, unit = modules[0].module, weight.input_unit
        if not unit:
            raise ConfigError(
                f"tensor_parallel_mode 'reduce': inputs of {name} that share a scale are not consecutive (desc_act), "
                "and cannot be divided; use --tensor-parallel-mode gather"
            )
        start, stop = inputs(unit)
        cut = next((each for each in (start, stop) if each % unit and each != shape.width), None)
        if cut is not None:
            raise ConfigError(
                f"tensor_parallel_mode 'reduce': each {unit} inputs of {name} share a scale, and a rank's part of "
                f"them ends at input {cut}; use --tensor-parallel-mode gather"
            )
        bias = self._read_biases(modules) if shape.has_bias and has_bias else None
        if shape.has_bias and not has_bias:  # rank 0 adds it
            self._tensors.names_read.update(f"{each.module}.bias" for each in modules)
        part = self._library.weight(weight.take_inputs(start, stop), self.device)
        layer = self.back_end.linear(part, self._taken_bias(bias), dtype=dtype)
        self._tally_layer(layer, sum(shape.num_rows) * (stop - start))
        return layer, (start, stop)

    def _module_rows(self, shape: LinearShape, ranges: Sequence[Range] | None) -> list[ModuleRows]:
        """Return the rows to read of each module, in order; of one module for several row counts, several times."""
        found, left = list[ModuleRows](), list(ranges or ())
        for module, counts in shape.module_rows:
            name, total = self._prefix + module, sum(counts)
            own, left = left[: len(counts)], left[len(counts) :]
            if ranges is None or shape.num_groups > 1 or shape.is_cut_anywhere:  # the rows are taken from the whole
                found.append(ModuleRows.whole(name, total))
            else:
                found += [ModuleRows(name, total, *rows) for rows in shifted(own, counts)]
        return found

    def experts(
        self, shapes: ExpertShapes, experts: Sequence[Expert], routing: Routing, split: ExpertSplit | None = None
    ) -> ExpertLayer:
        """Return a mixture of experts. The router is of floats, whatever the weight format; its scores are float32."""
        scores = self.linear(shapes.router, dtype=self._library.dtype("float32"), weight_format=DenseFormat())
        bias, scales = (None if each is None else self.vector(each) for each in (shapes.bias, shapes.scales))
        return self.back_end.experts(scores, experts, routing, split, bias, scales)

    def kv_scales(self, shape: LinearShape) -> KVScales:
        """Return the scales of a layer's keys and values that calibrated checkpoints have, else 1; `shape`: of qkv."""
        stem = self._prefix + shape.modules[0].rpartition(".")[0]
        scales = KVScales(self._scale(f"{stem}.k_scale"), self._scale(f"{stem}.v_scale"))
        self._keep(np.array(scales))
        return scales

    def head(
        self, shape: LinearShape, embedding: TokenTable | None, *, is_tied: bool, rows: Range | None = None
    ) -> Linear:
        """Return the layer from hidden states to logits, in float32; by default the embedding table itself when tied.

        `embedding`: None for a head that is not tied, of a model without a table of its own. rows: those of the
        vocabulary that are read; None: all. A tied head counts as no parameters of its own, unless the checkpoint has
        tensors of it.
        """
        num_read, names, num_rows = len(self._tensors.names_read), self._tensors.names, shape.num_rows[0]
        others = (stem for stem in self.names.other_heads if any(name.startswith(f"{stem}.") for name in names))
        module = ModuleRows(next(others, shape.modules[0]), num_rows, *(rows or (0, num_rows)))
        table, own = None if embedding is None else embedding.stored, slice(*module.rows)
        table = table[own] if isinstance(table, np.ndarray) else table
        read = self._format.read_head(self._tensors, module, shape.width, table if is_tied else None)
        bias = self._read_biases([module]) if shape.has_bias else None
        if embedding is not None and read.format == DENSE and read.data[0] is table:  # one on a GPU, too
            weight = LinearWeight.dense(embedding.taken[own])  # type: ignore[index]
        else:
            weight = self._library.weight(read, self.device)
        layer = self.back_end.head(weight, self._taken_bias(bias))
        is_counted = len(self._tensors.names_read) > num_read
        self._tally_layer(layer, (module.stop - module.start) * shape.width if is_counted else 0)
        return layer

    def integers(self, name: str, length: int) -> NDArray[np.int64] | None:
        """Return a tensor of integers [length]; None if the checkpoint does not have it."""
        name = self._prefix + name
        if name not in self._tensors.names:
            return None
        return self._tensors.raw(name, (length,), ("I64", "I32")).astype(np.int64)

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return values, rounded to the model's dtype."""
        return converted(converted(values, self._tensors.dtype), FLOAT32)

    def warn_of_unread(self) -> None:
        """Log the tensors that no module has read, apart from those known to be harmless."""
        unread = sorted(
            name
            for name in self._tensors.names
            if name not in self._tensors.names_read and not name.endswith(self.names.harmless)
            and not any(part in name for part in self.names.skipped)
        )
        if unread:
            log.warning(
                "%d tensors of the checkpoint are not used: %s%s",
                len(unread),
                ", ".join(unread[:MAX_NAMES_IN_WARNING]),
                ", ..." if len(unread) > MAX_NAMES_IN_WARNING else "",
            )

    def _find_prefix(self) -> str:
        """Return the prefix under which the checkpoint has its embeddings, or the usual one if it has none."""
        found = (p for p in self.names.prefixes if f"{p}{self.names.embedding}.weight" in self._tensors.names)
        return next(found, self.names.prefixes[0])

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the model's dtype as the back end takes them."""
        return self.taken(np.zeros(shape, self._tensors.dtype))

    def taken(self, array: Array) -> Tensor:
        """Return an array as the back end takes it."""
        return self._library.tensor(array, self.device)

    def _taken_bias(self, bias: Array | None) -> Tensor | None:
        return None if bias is None else self.taken(bias)

    def _read_kept(
        self, names: list[str], shapes: list[tuple[int, ...]], dtype: DType | None = None
    ) -> Array:
        """Return the tensors one after the other along dimension 0, in memory of their own."""
        parts = zip(names, shapes, strict=True)
        found = [self._tensors.floats(name, shape, dtype=dtype) for name, shape in parts]
        is_own = len(names) == 1 and self._tensors.is_converted(names[0], dtype or self._tensors.dtype)
        return self._tallied(found[0] if is_own else concatenated(found))

    def _read_biases(self, modules: Sequence[ModuleRows], order: Array | None = None) -> Array:
        """Return the biases of some outputs of modules, one after the other; of those, the ones at `order`."""
        found = [self._tensors.floats(f"{each.module}.bias", (each.num_rows,), each.rows) for each in modules]
        return self._counted(concatenated(found) if order is None else concatenated(found)[order])

    def _tallied(self, whole: Array) -> Array:
        self._keep(whole)
        return self._counted(whole)

    def _counted(self, whole: Array) -> Array:
        self.tally.num_parameters += whole.size
        self.tally.weight_bytes += whole.nbytes
        return whole

    def _scale(self, name: str) -> float:
        """Return the number of a tensor, 1 if the checkpoint does not have it."""
        if name not in self._tensors.names:
            return 1.0
        shape = self._tensors.shape(name)
        if shape not in ((), (1,)):
            raise self._tensors.error(name, f"has shape {list(shape)}, expected one number")
        scale = float(self._tensors.floats(name, shape, dtype=FLOAT32).item())
        if not SMALLEST_KV_SCALE <= scale <= 1 / SMALLEST_KV_SCALE:
            raise self._tensors.error(name, f"is {scale}, expected {SMALLEST_KV_SCALE} to {1 / SMALLEST_KV_SCALE}")
        return scale

    def _tally_layer(self, layer: Linear, num_weights: int) -> None:
        self.tally.num_parameters += num_weights
        self.tally.weight_bytes += layer.num_bytes
        self._keep(layer)

    def _keep(self, read: Linear | StoredTable | Array) -> None:
        """Add to what is computed with; a GPU has copies, and memory that was read from is not held for it."""
        if self._tensors.takes_stored_tables:
            self.tally.kept.append(read)


def row_order(shape: LinearShape, ranges: Sequence[Range] | None = None) -> Array | None:
    """Return the places of a layer's rows, or of ranges of them, among those that are read; None: they are in order."""
    if shape.num_groups > 1 or (shape.is_cut_anywhere and ranges is not None):
        return ungrouped(shape, ranges)
    if not shape.num_gated_heads:
        return None
    num_rows = shape.num_rows if ranges is None else [stop - start for start, stop in ranges]
    head_dim = shape.num_rows[0] // (2 * shape.num_gated_heads)
    return concatenated([gates_last(num_rows[0], head_dim), np.arange(num_rows[0], sum(num_rows))])


def gates_last(num_rows: int, head_dim: int) -> Array:
    """Return the places of rows that are, for each head, those of a query and of a gate: all queries come first."""
    return np.arange(num_rows).reshape(-1, 2, head_dim).swapaxes(0, 1).ravel()


def ungrouped(shape: LinearShape, ranges: Sequence[Range] | None = None) -> Array:
    """Return the places in the file of a layer's rows, or of ranges of them; modules' rows are stored in groups."""
    ends = np.cumsum([count // shape.num_groups for count in shape.num_rows])
    places = np.arange(sum(shape.num_rows)).reshape(shape.num_groups, -1)
    whole = np.concatenate([rows.ravel() for rows in np.split(places, ends[:-1], axis=1)])
    return whole if ranges is None else concatenated([whole[slice(*rows)] for rows in shifted(ranges, shape.num_rows)])
