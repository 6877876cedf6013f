"""Packed weights: a model's weights out of a packed file that fits, or read from its checkpoint and put into one.

A packed file is a cache. It is used if it was made by this version of Quire, of the same source files, for the same
dtype and quantization; else it is written anew. Stored embedding tables of models with another head, and scales of
a KV cache, are not in it: they are read from the checkpoint as they are there.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.arrays import UINT8, Array, DType, dtype_name
from quire.core.errors import ConfigError
from quire.core.version import __version__
from quire.kernels import tensors
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.cpp_packing import PACKING_VERSION, PackedWeight
from quire.kernels.layers import GATED, Linear
from quire.kernels.linear_weight import LinearWeight, StoredTable, WeightPortions
from quire.model.checkpoints.packed_file import (
    DTYPES,
    SUFFIX,
    Fields,
    PackedFileError,
    PackedRecords,
    Record,
    digest_text,
    read_packed,
    write_packed,
)
from quire.model.decoder import Decoder
from quire.model.draft_head import DraftHead
from quire.model.quantization import Quantization
from quire.model.resolve import DIGEST_SUFFIXES
from quire.model.shapes import LinearShape
from quire.model.sharding import Range
from quire.model.weight_format import WeightFormat
from quire.model.weights import TokenTable, WeightReader

log = logging.getLogger(__name__)

DIGESTED_BYTES = 1 << 20  # from the beginning of each source file: a whole config or header
_COUNTS = ("num_parameters", "weight_bytes")  # what a layer adds to the tally
_ARRAYS = ("packed", "order", "groups", "codebook")  # fields of a `PackedWeight`; the others are plain values


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Place of packed weights: a file with the suffix .quire, or a folder with a file for each model and setting.

    `must_write`: a file that cannot be written is an error, and another process that writes one is waited for.
    """

    path: Path
    must_write: bool = False

    def file(self, model: Path, settings: Fields) -> Path:
        """Return the file of a model. ConfigError for a path that is neither."""
        if self.path.suffix == SUFFIX:
            return self.path
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"packed_weights {str(self.path)!r} must be a folder, or a file with a name that ends in {SUFFIX}"
            )
        code = hashlib.blake2b(f"{model.resolve()} {settings}".encode(errors="replace"), digest_size=4).hexdigest()
        return self.path / f"{model.resolve().name}-{settings['dtype']}-{settings['method']}-{code}{SUFFIX}"


def decoder_of_packed(
    place: PackedPlace, model: Path, settings: Fields, build: Callable[[PackedRecords], Decoder]
) -> Decoder:
    """Return what `build` makes of the packed file of a model, which is written first if none fits.

    settings: as `settings_of` returns them.
    """
    path, started = place.file(model, settings), time.perf_counter()
    identity = {
        "version": __version__, "packing": PACKING_VERSION, "settings": settings, "files": identity_of_files(model)
    }  # fmt: skip
    try:
        decoder = build(read_packed(path, identity))
        log.info("packed weights of %s: read in %.2f s", path, time.perf_counter() - started)
        return decoder
    except FileNotFoundError:
        log.info("packed weights: no %s yet", path)
    except (PackedFileError, OSError) as error:
        log.warning("packed weights are not used, and packed again: %s", error)
    made = PackedRecords(str(path))
    decoder = build(made)
    started = time.perf_counter()
    try:
        if write_packed(path, identity, made, waits=place.must_write):
            log.info("packed weights: %s written in %.2f s", path, time.perf_counter() - started)
        else:
            log.info("packed weights: another process writes in %s", path.parent)
    except OSError as error:
        if place.must_write:
            raise
        log.warning("packed weights of the next start cannot be written: %s", error)
    return decoder


def settings_of(dtype: str, quantization: Quantization, *, has_head: bool) -> Fields:
    """Return the settings that decide how a model's weights are packed."""
    schemes = hashlib.blake2b(repr(quantization).encode(), digest_size=8).hexdigest()
    return {
        "dtype": dtype, "method": quantization.method, "quantization": str(quantization), "schemes": schemes,
        "has_head": has_head,
    }  # fmt: skip


def weights_digest(decoder: Decoder | DraftHead) -> str:
    """Return the SHA-256 of the digests of all arrays that a decoder, or a head, of the C++ back end computes with.

    They are those in memory, packed; so a start with a packed file and one without have the same digest.
    """
    found = hashlib.sha256()
    for each in decoder.kept_weights:
        if isinstance(each, CppLinear):
            record = _record(each, {})
        elif isinstance(each, np.ndarray):
            record = Record({}, {"values": each})
        else:
            assert isinstance(each, StoredTable), f"a layer {type(each).__name__} of another back end"
            form, rows = each.stored
            record = Record({"form": form}, {"values": rows})
        found.update(repr(record.fields).encode())
        for name, array in record.arrays.items():
            octets = np.ascontiguousarray(array).reshape(-1).view(UINT8)
            found.update(f"{name} {dtype_name(array.dtype)} {array.shape} {digest_text(octets)}\n".encode())
    return found.hexdigest()


def identity_of_files(model: Path) -> list[list[Any]]:
    """Return name, bytes, time of change in ns, and digest of the beginning of each file of a model."""
    inside = [model] if model.is_file() else sorted(model.iterdir())
    files = [each for each in inside if each == model or (each.suffix in DIGEST_SUFFIXES and each.is_file())]
    found = list[list[Any]]()
    for each in files:
        with each.open("rb") as file:
            digest = hashlib.blake2b(file.read(DIGESTED_BYTES), digest_size=16).hexdigest()
        status = each.stat()
        found.append([each.name.encode(errors="replace").decode(), status.st_size, status.st_mtime_ns, digest])
    return found


class PackedReader(WeightReader):
    """A `WeightReader` of C++ layers that takes them from records, or while those are being made adds them.

    Every failure of a file is a PackedFileError.
    """

    def __init__(self, *arguments: Any, records: PackedRecords) -> None:  # noqa: ANN401 (as `WeightReader`)
        super().__init__(*arguments)
        self._records = records

    def linear(
        self,
        shape: LinearShape,
        ranges: Sequence[Range] | None = None,
        *,
        dtype: tensors.DType | None = None,
        weight_format: WeightFormat | None = None,
    ) -> Linear:
        """Return one layer, of all rows."""
        assert ranges is None, "rows of a rank"
        read = partial(super().linear, shape, dtype=dtype, weight_format=weight_format)
        make = partial(self.back_end.linear, dtype=dtype, activation=shape.activation or "none")
        return self._layer("+".join(self._prefix + module for module in shape.modules), shape, read, make)

    def head(
        self, shape: LinearShape, embedding: TokenTable | None, *, is_tied: bool, rows: Range | None = None
    ) -> Linear:
        """Return the layer from hidden states to logits, of the whole vocabulary."""
        assert rows is None, "rows of a rank"
        read = partial(super().head, shape, embedding, is_tied=is_tied)
        return self._layer(f"head {shape.modules[0]}", shape, read, self.back_end.head)

    def _made_head(self, shape: LinearShape, read: Callable[[], LinearWeight | WeightPortions]) -> Linear:
        make = partial(super()._made_head, shape, read)
        return self._layer(f"head {shape.modules[0]}", shape, make, self.back_end.head)

    def warn_of_unread(self) -> None:
        """Log tensors that are not used, when the checkpoint was read."""
        if not self._records.is_complete:
            super().warn_of_unread()

    def _layer(
        self, name: str, shape: LinearShape, read: Callable[[], Linear], make: Callable[..., Linear]
    ) -> Linear:
        kept, tally = self._records.find(name), self.tally
        if kept is None:
            before = tally.num_parameters, tally.weight_bytes
            layer = read()
            assert isinstance(layer, CppLinear)
            counts = tally.num_parameters - before[0], tally.weight_bytes - before[1]
            self._records.add(name, _record(layer, dict(zip(_COUNTS, counts, strict=True))))
            return layer
        num_rows = sum(shape.num_rows)
        try:
            weight, bias = _layer_of(kept)
            counts = int(kept.fields[_COUNTS[0]]), int(kept.fields[_COUNTS[1]])
            is_alike = (weight.out_features, weight.in_features) == (num_rows, shape.width)
            is_sound = is_alike and weight.is_sound(2 if shape.activation in GATED else 1)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._records.error(name, f"is no layer: {error!r:.100}") from error
        if not is_sound or weight.value_dtype != self.dtype:
            raise self._records.error(name, f"is no weight [{num_rows}, {shape.width}] of {dtype_name(self.dtype)}")
        if (bias is not None) != shape.has_bias or (bias is not None and not _is_array(bias, "float32", (num_rows,))):
            raise self._records.error(name, "has another bias")
        layer = make(weight, bias)
        tally.num_parameters += counts[0]
        tally.weight_bytes += counts[1]
        tally.kept.append(layer)
        return layer

    def _read_kept(self, names: list[str], shapes: list[tuple[int, ...]], dtype: DType | None = None) -> Array:
        """Return the tensors one after the other along dimension 0."""
        kept = self._records.find(names[0])
        if kept is None:
            whole = super()._read_kept(names, shapes, dtype)
            self._records.add(names[0], Record({}, {"values": whole}))
            return whole
        values, wanted = kept.arrays.get("values"), dtype_name(dtype or self.dtype)
        shape = sum(each[0] for each in shapes), *shapes[0][1:]
        if values is None or not _is_array(values, wanted, shape):
            raise self._records.error(names[0], f"is no {wanted} {list(shape)}")
        return self._tallied(values)


def _record(layer: CppLinear, counts: Fields) -> Record:
    weight = layer.packed_weight
    arrays = {name: getattr(weight, name) for name in _ARRAYS} | {"bias": layer.bias}
    fields = {name: getattr(weight, name) for name in PackedWeight.__slots__ if name not in _ARRAYS}
    fields |= {"value_dtype": dtype_name(weight.value_dtype)} | counts
    return Record(fields, {name: each for name, each in arrays.items() if each is not None})


def _layer_of(record: Record) -> tuple[PackedWeight, Array | None]:
    """Return the weight and the bias of a layer; their form is not checked, but numbers are numbers."""
    fields = record.fields | record.arrays
    weight = PackedWeight(**{name: each for name, each in fields.items() if name not in ("bias", *_COUNTS)})
    sizes = weight.out_features, weight.in_features, weight.group_size, weight.zero_point
    if not all(type(each) is int for each in sizes) or weight.in_features < 1 or weight.out_features < 1:
        raise ValueError(f"sizes {sizes}")
    return replace(weight, value_dtype=DTYPES[record.fields["value_dtype"]]), record.arrays.get("bias")


def _is_array(array: Array, dtype: str, shape: tuple[int, ...]) -> bool:
    return (array.dtype, array.shape) == (DTYPES[dtype], shape)
