"""Encoder of images of any size as tiles of one size: one of the whole image, and those of the image scaled up.

A tile is encoded by itself, as an image of one size. The rows of all tiles are put together as they are in the image,
without those of its padding; of more rows than a number of tiles have, as many are interpolated. Li et al. 2024
(LLaVA-OneVision).
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.image_processing import shrunk
from quire.kernels.tensors import Tensor, concatenated_rows, floats, like
from quire.model.shapes import VisionShapes
from quire.model.spec import VisionSpec
from quire.model.vision import VisionTower
from quire.model.weights import WeightReader


class TiledTower:
    """Encoder and projector of a decoder, ready to run; arguments as in `VisionTower`."""

    def __init__(self, spec: VisionSpec, weights: WeightReader, progress: NDArray[np.int64]) -> None:
        assert spec.tiles is not None, "images of one size"
        self.spec, self._tiles = spec, spec.tiles
        self._tower = VisionTower(spec, weights, progress)
        self.itemsize, newline = self._tower.itemsize, VisionShapes.of(spec).newline
        assert newline is not None, "rows without an end"
        self._newline = floats(weights.below(("", "model."), self._tiles.newline).vector(newline))

    def layer_flops(self, num_tokens: int) -> float:
        """Return the operations of a layer for a tile: it is computed by itself."""
        return self._tower.layer_flops(num_tokens)

    def encode(self, pixels: NDArray[np.float32], grid: tuple[int, int]) -> Tensor:
        """Return the rows of an image [num_tokens, hidden_size], of the model's dtype.

        pixels: [channels, height, width], the tile of all of the image below the left one of the others. grid: rows
        and columns of what the encoder gives for the image, but not for its padding.
        """
        size, side = self._tiles.size, self.spec.grid
        num_rows, num_columns = pixels.shape[1] // size - 1, pixels.shape[2] // size
        whole = self._encoded(pixels, num_rows, 0)
        found = np.empty((num_rows, side, num_columns, side, self.spec.hidden_size), np.float32)
        for row in range(num_rows):
            for column in range(num_columns):
                tile = floats(self._encoded(pixels, row, column))
                found[row, :, column] = tile.reshape(side, side, -1)
        joined = found.reshape(num_rows * side, num_columns * side, -1)
        top, left = ((have - keep) // 2 for have, keep in zip(joined.shape[:2], grid, strict=True))
        joined = joined[top : top + grid[0], left : left + grid[1]]
        if (kept := shrunk(grid, side, self._tiles.most)) != grid:
            joined = resized(joined, *kept)
        ends = np.broadcast_to(self._newline, (len(joined), 1, len(self._newline)))
        rows = np.concatenate([joined, ends], axis=1).reshape(-1, len(self._newline))
        return concatenated_rows([whole, like(rows, whole)])

    def _encoded(self, pixels: NDArray[np.float32], row: int, column: int) -> Tensor:
        """Return the rows of a tile, in memory of their own; pixels behind its last patches are not seen."""
        size, seen = self._tiles.size, self.spec.image_size
        top, left = row * size, column * size
        return concatenated_rows([self._tower.encode(pixels[:, top : top + seen, left : left + seen])])


def resized(values: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Return [rows, columns, any] scaled to height x width: bilinear, each place the center of a part of the edge."""
    for axis, count in ((0, height), (1, width)):
        length = values.shape[axis]
        at = np.maximum((np.arange(count, dtype=np.float32) + np.float32(0.5)) * np.float32(length / count) - 0.5, 0)
        first = at.astype(np.int64)
        share = np.expand_dims(at - first, tuple({0, 1, 2} - {axis})).astype(np.float32)
        second = np.minimum(first + 1, length - 1)
        values = values.take(first, axis) * (1 - share) + values.take(second, axis) * share
    return values
