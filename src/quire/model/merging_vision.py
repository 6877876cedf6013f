"""Encoder of images of any size, in which squares of neighboring patches, or single ones, become a row of the decoder.

The patches of a square are consecutive rows, and squares that see each other in layers with windows are, too.
Rotary positions are by row and column: a patch has a row of the rotary table of its own. Wang et al. 2024 (Qwen2-VL);
Bai et al. 2025 (Qwen2.5-VL); Meng et al. 2024 (DeepStack), of which Qwen3-VL adds outputs of early layers; Agrawal et
al. 2024 (Pixtral 12B).
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.kernels.back_end import require_attention, require_ops
from quire.kernels.paged_attention import build_metadata
from quire.kernels.program import LayerInputs, Program
from quire.kernels.tensors import Tensor, added, empty_like, floats, like, take_rows
from quire.model.config import num_layer_weights
from quire.model.decoder import TextCache
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import ProgramInputs, build_program, make_norm
from quire.model.rope import RotaryTable, RotaryTables, inverse_frequencies
from quire.model.shapes import VisionShapes
from quire.model.spec import Merging, Rotary, VisionSpec
from quire.model.vision import TowerProjector
from quire.model.weight_format import DenseFormat
from quire.model.weights import WeightReader


class Grid(NamedTuple):
    """The patches of an image in the order of the encoder: squares, those of a window one after the other."""

    order: NDArray[np.int64]           # the square at each place, squares numbered by rows
    rows: NDArray[np.int64]            # row of each patch, in patches
    columns: NDArray[np.int64]
    window_lengths: NDArray[np.int64]  # patches of each window


def grid_of(height: int, width: int, side: int, window: int) -> Grid:
    """Return the grid of an image of height x width squares of side x side patches.

    `window`: squares in a row, and in a column, of a window; 0: there is one of all.
    """
    size = window or max(height, width)
    row, column = (each.ravel() for each in np.indices((height, width)))
    windows = row // size * -(-width // size) + column // size
    order = np.argsort(windows, kind="stable")
    inner = np.arange(side)
    rows = (row[order, None, None] * side + inner[:, None]).repeat(side, axis=2).ravel()
    columns = (column[order, None, None] * side + inner).repeat(side, axis=1).ravel()
    return Grid(order, rows, columns, np.bincount(windows) * side**2)


class MergingTower:
    """Encoder and projector of a decoder, ready to run.

    `weights`: the reader of the decoder, which counts them too. `progress`: the decoder's count of layers.
    """

    def __init__(self, spec: VisionSpec, weights: WeightReader, progress: NDArray[np.int64]) -> None:
        assert spec.merging is not None, "images of one size"
        self.spec, self._merging, self._back_end = spec, spec.merging, weights.back_end
        tower, shapes, names = spec.tower, VisionShapes.of(spec), spec.tower.weights
        own = weights.below(names.prefixes, spec.patches, names)
        self._patches = own.linear(shapes.patches, weight_format=DenseFormat())
        self._none, self.itemsize = own.zeros(0), own.dtype.itemsize
        self._positions = None if shapes.positions is None else own.table(shapes.positions)
        (rotary,) = tower.rotaries
        self._norm = None if shapes.pre_norm is None else make_norm(tower, own, shapes.pre_norm)
        frequencies = _frequencies(rotary, by_columns=self._merging.has_column_frequencies)
        table = RotaryTable(np.concatenate(frequencies), rotary.max_positions, num_free=rotary.max_positions)
        self._rotary = RotaryTables([table], np.repeat([0, 1], len(frequencies[0])).tolist())
        shared = ProgramInputs({rotary: own.taken(table.values)}, progress)
        self._segments, first = list[Segment](), 0
        for stop in _stops(self._merging, tower.num_layers):
            program = build_program(tower, own, shared, range(first, stop))
            require_ops(self._back_end.name, program.ops)
            require_attention(self._back_end.attention, program.ops, own.dtype)
            is_whole = not self._merging.window or first in self._merging.whole_layers
            self._segments.append(Segment(self._back_end.fuse(program), is_whole, stop - 1))
            first = stop
        projectors = weights.below(spec.projector_prefixes, spec.projector[0], names)
        eps, is_layer = spec.projector_norm_eps or tower.norm_eps, tower.norm == "layer"
        by_channels = self._merging.merger is not None
        self._projector, *deep = (
            TowerProjector(each, projectors, eps, is_layer=is_layer, offset=None, by_channels=by_channels)
            for each in (shapes.projector, *shapes.deep)
        )
        self._deep = dict(zip(self._merging.deep_layers, deep, strict=True))
        self._cache = TextCache(tower, own.dtype, self._back_end)

    def layer_flops(self, num_tokens: int) -> float:
        """Return the operations of the largest layer for an image: one without windows."""
        (row, pair), num_layers = merged_flops(self.spec), self.spec.tower.num_layers
        num_whole = max(len(self._merging.whole_layers), 1) if self._merging.window else num_layers
        return num_tokens * (row / num_layers + num_tokens * pair / num_whole)

    def encode(self, pixels: NDArray[np.float32]) -> Tensor:
        """Return the rows of an image [num_tokens, row_width], of the model's dtype.

        pixels: [channels, height, width], multiples of `spec.unit`.
        """
        spec, side = self.spec, self.spec.pool
        height, width = (size // spec.unit for size in pixels.shape[1:])
        grid = grid_of(height, width, side, self._merging.window)
        x = self._patches(like(self._cut(pixels, grid), self._none))
        if self._positions is not None:
            x = added(x, like(interpolated(floats(self._positions), grid, height * side, width * side), x))
        if self._norm is not None:
            x = self._norm(x)[0]
        num_rows, places = len(x), np.stack([grid.rows, grid.columns])
        self._rotary.fill(int(places.max()) + 1)
        positions = self._back_end.library.tensor(self._rotary.place(places))
        windowed, whole = self._placed(grid.window_lengths), self._placed(np.array([num_rows]))
        merged = dict[int, Tensor]()
        for program, is_whole, last in self._segments:
            batch, cache = whole if is_whole else windowed
            metadata = build_metadata(batch.block_tables, batch.query_starts, batch.context_lens, cache.block_size)
            inputs = LayerInputs(positions, batch.slot_mapping, metadata, cache.keys, cache.values)
            x = program.run(x, inputs)
            if last in self._deep:
                joined = take_rows(x, np.arange(num_rows)).reshape(num_rows // side**2, -1)  # the next layers write x
                merged[last] = self._deep[last](joined)
        out = np.argsort(grid.order)
        parts = [self._projector(x, side**2), *(merged[layer] for layer in self._merging.deep_layers)]
        rows = empty_like(parts[0], (len(out), spec.row_width))
        for index, part in enumerate(parts):
            rows[:, index * spec.hidden_size : (index + 1) * spec.hidden_size] = take_rows(part, out)
        return rows

    def _cut(self, pixels: NDArray[np.float32], grid: Grid) -> NDArray[np.float32]:
        """Return the patches of an image in the order of a grid, each as frames that are all the image."""
        spec, side, frames = self.spec, self.spec.pool, self._merging.num_frames
        channels, height, width = pixels.shape
        size, squares = spec.patch_size, (height // spec.unit, width // spec.unit)
        cut = pixels.reshape(channels, squares[0], side, size, squares[1], side, size).transpose(1, 4, 2, 5, 0, 3, 6)
        cut = cut.reshape(len(grid.order), side**2, channels, 1, size**2)[grid.order]
        return np.broadcast_to(cut, (*cut.shape[:3], frames, size**2)).reshape(len(grid.rows), -1)

    def _placed(self, lengths: NDArray[np.int64]) -> tuple[ForwardBatch, KVCache]:
        """Return a step of consecutive rows that see each other, with places for their keys and values."""
        starts = np.concatenate([[0], lengths.cumsum()])
        num_rows, positions = int(starts[-1]), np.arange(starts[-1]) - starts[:-1].repeat(lengths)
        batch = ForwardBatch(
            np.zeros(num_rows, np.int64), positions, np.zeros(num_rows, np.int64), starts.astype(np.int32),
            lengths.astype(np.int32), np.zeros((len(lengths), 1), np.int32),
        )  # fmt: skip
        return self._cache.place(batch.taken(self._back_end.library))


def _frequencies(rotary: Rotary, *, by_columns: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the frequencies that rows and columns of patches turn by: the same ones, or `by_columns` those between."""
    if by_columns:
        both = inverse_frequencies(rotary, rotary.max_positions)
        return both[0::2], both[1::2]
    half = inverse_frequencies(replace(rotary, head_dim=rotary.head_dim // 2), rotary.max_positions)
    return half, half


class Segment(NamedTuple):
    """Consecutive layers, up to `last`, in which patches see all others, or those of their window."""

    program: Program
    is_whole: bool
    last: int


def _stops(merging: Merging, num_layers: int) -> list[int]:
    """Return where a segment ends: in front of layers that see other patches, and behind those with a projector."""
    changes = (
        index for index in range(1, num_layers)
        if merging.window and (index in merging.whole_layers) != (index - 1 in merging.whole_layers)
    )  # fmt: skip
    return sorted({*changes, *(index + 1 for index in merging.deep_layers), num_layers})


def interpolated(table: NDArray[np.float32], grid: Grid, height: int, width: int) -> NDArray[np.float32]:
    """Return the position of each patch of height x width ones, from the table [side * side, width] of a square.

    Bilinear, with the corners of both in the same places.
    """
    side = math.isqrt(len(table))
    (top, bottom), (above, below) = _taps(grid.rows, height, side)
    (left, right), (before, behind) = _taps(grid.columns, width, side)
    found = np.zeros((len(grid.rows), table.shape[1]), np.float32)
    for row, row_share in ((top, above), (bottom, below)):
        for column, column_share in ((left, before), (right, behind)):
            found += table[row * side + column] * (row_share * column_share)[:, None]
    return found


def _taps(places: NDArray[np.int64], count: int, side: int) -> tuple[Any, Any]:
    """Return the two entries of a side of a table that each of `count` places is between, and their shares."""
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    first = np.floor(at)
    share = at - first
    entry = first.astype(np.int64)
    return (entry, np.minimum(entry + 1, side - 1)), (1 - share, share)


class MergedFlops(NamedTuple):
    """Operations of an image: for each row of the decoder, and for each pair of such rows."""

    row: float
    pair: float


def merged_flops(spec: VisionSpec) -> MergedFlops:
    """Return the operations that an image takes: products of layers, projectors and patches, and attention."""
    assert spec.merging is not None, "images of one size"
    tower, merging, shapes, side = spec.tower, spec.merging, VisionShapes.of(spec), spec.pool**2
    projectors = sum(shape.num_weights for each in (shapes.projector, *shapes.deep) for shape in each.layers)
    attended = 4.0 * tower.num_heads * tower.head_dim * side**2  # flops of a layer for a pair of squares
    num_whole = len(merging.whole_layers) if merging.window else tower.num_layers
    windows = (tower.num_layers - num_whole) * attended * merging.window**2
    products = 2.0 * (side * (num_layer_weights(tower) + shapes.patches.num_weights) + projectors)
    return MergedFlops(products + windows, num_whole * attended)
