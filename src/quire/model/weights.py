"""Weight reader: a family's tensors out of a checkpoint, fused, converted and packed, module by module."""

import copy
import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.errors import ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.linear import Linear, LinearWeight
from quire.model.checkpoints.checkpoint import Checkpoint, read_rows
from quire.model.shapes import LinearShape, NormShape, TableShape
from quire.model.spec import WeightMap
from quire.model.weight_formats.dense import DenseFormat
from quire.model.weight_formats.format import WeightFormat

log = logging.getLogger(__name__)

MAX_NAMES_IN_WARNING = 5


@dataclass(slots=True)
class ReadTally:
    """Names, parameters and bytes read so far; shared by a reader and its layers."""

    names: set[str] = field(default_factory=set)
    num_parameters: int = 0
    weight_bytes: int = 0  # as kept in memory


class WeightReader:
    """Reader of modules by the names of the family's map. Every failure is a ModelError that names the tensor."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: WeightMap,
        back_end: BackEnd,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self.names = names
        self.back_end = back_end
        self.dtype = dtype
        self.device = device
        self.tally = ReadTally()
        self._checkpoint = checkpoint
        self._format = weight_format or DenseFormat()
        self._prefix = self._find_prefix()

    def layer(self, index: int) -> "WeightReader":
        """Return a reader of the modules of one layer."""
        scoped = copy.copy(self)
        scoped._prefix = self._prefix + self.names.layer.format(layer=index)
        return scoped

    def table(self, shape: TableShape) -> Tensor:
        """Return an embedding table [num_rows, width]."""
        return self._read_kept([f"{self._prefix}{shape.module}.weight"], [(shape.num_rows, shape.width)])

    def norm(self, shape: NormShape) -> tuple[Tensor, Tensor | None]:
        """Return a norm's weight and, if it has one, its bias, each [width]."""
        stem = self._prefix + shape.module
        weight = self._read_kept([f"{stem}.weight"], [(shape.width,)])
        return weight, self._read_kept([f"{stem}.bias"], [(shape.width,)]) if shape.has_bias else None

    def linear(self, shape: LinearShape) -> Linear:
        """Return one layer, the modules' rows on top of each other."""
        num_rows = shape.num_rows if len(shape.modules) > 1 else [sum(shape.num_rows)]
        stems = [self._prefix + module for module in shape.modules]
        weight = self._format.read(self._read, stems, num_rows, shape.width, is_transposed=self.names.is_transposed)
        biases = [f"{stem}.bias" for stem in stems]
        bias = self._read_kept(biases, [(count,) for count in num_rows]) if shape.has_bias else None
        layer = self.back_end.linear(weight, bias, activation=shape.activation or "none")
        self.tally.weight_bytes += layer.num_bytes
        return layer

    def head(self, shape: LinearShape, embedding: Tensor, *, is_tied: bool) -> Linear:
        """Return the layer from hidden states to logits, in float32; the embedding table itself when tied.

        A head tensor in the checkpoint of a tied model is used, as by transformers 5.
        """
        name = f"{shape.modules[0]}.weight"
        is_read = not is_tied or name in self._checkpoint.names
        weight = self._read([name], [(shape.num_rows[0], shape.width)]) if is_read else embedding
        layer = self.back_end.linear(LinearWeight.dense(weight), dtype=torch.float32)
        self.tally.weight_bytes += layer.num_bytes
        return layer

    def warn_of_unread(self) -> None:
        """Log the tensors that no module has read, apart from those known to be harmless."""
        unread = sorted(
            name
            for name in self._checkpoint.names
            if name not in self.tally.names and not name.endswith(self.names.harmless)
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
        found = (p for p in self.names.prefixes if f"{p}{self.names.embedding}.weight" in self._checkpoint.names)
        return next(found, self.names.prefixes[0])

    def _read_kept(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Return the tensors one after the other along dimension 0, in memory of their own."""
        whole = torch.cat(self._read(names, shapes))
        self.tally.weight_bytes += whole.nbytes
        return whole

    def _read(
        self, names: list[str], shapes: list[tuple[int, ...]], *, is_transposed: bool = False
    ) -> list[Tensor]:
        """Return the tensors in the model's dtype, on its device; those that have both are the file's own memory.

        `shapes` are those wanted; a transposed tensor has its shape reversed in the file.
        """
        parts = []
        for name, shape in zip(names, shapes, strict=True):
            part = read_rows(self._checkpoint, name, shape[::-1] if is_transposed else shape)
            part = part.to(self.device, self.dtype)
            self._require_finite(name, part)
            parts.append(part.T if is_transposed else part)
        self.tally.names.update(names)
        self.tally.num_parameters += sum(part.numel() for part in parts)
        return parts

    def _require_finite(self, name: str, tensor: Tensor) -> None:
        if not self.back_end.all_finite(tensor):
            place = self._checkpoint.location(name)
            raise ModelError(f"{place}: tensor {name} has values that are NaN or infinite in {self.dtype}")
