"""Encoder of images: patches through a tower of layers that are not causal, and a projector to the decoder's width.

A tower is an encoder like those of texts, with patches in place of tokens, so an image's rows have the same bits
whatever else is computed. Radford et al. 2021 (CLIP); Liu et al. 2023 (LLaVA); Zhai et al. 2023
(SigLIP).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.kernels.back_end import require_attention, require_ops
from quire.kernels.layers import Norm
from quire.kernels.paged_attention import build_metadata
from quire.kernels.program import LayerInputs
from quire.kernels.tensors import Tensor, added, floats, like
from quire.model.config import num_layer_weights
from quire.model.decoder import TextCache
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import ProgramInputs, build_program, make_norm
from quire.model.shapes import ProjectorShapes, VisionShapes
from quire.model.spec import VisionSpec
from quire.model.weight_format import DenseFormat
from quire.model.weights import WeightReader


class TowerProjector:
    """A norm, if there is one, and the layers to the decoder's width; settings of the norm as in `BackEnd`.

    `by_channels`: of joined rows, all of one channel are neighbors.
    """

    def __init__(
        self, shapes: ProjectorShapes, weights: WeightReader, eps: float, *, is_layer: bool, offset: float | None,
        by_channels: bool = False,
    ) -> None:  # fmt: skip
        self._by_channels = by_channels
        self._norm: Norm | None = None
        if shapes.norm is not None:
            weight, bias = weights.norm(shapes.norm)
            self._norm = weights.back_end.norm(weight, bias, eps, is_layer, offset)
        self._layers = [weights.linear(shape) for shape in shapes.layers]

    def __call__(self, hidden: Tensor, num_merged: int = 1) -> Tensor:
        """Return rows of the decoder's width; `num_merged`: rows that are joined to one, behind a norm of each."""
        if self._norm is not None:
            hidden = self._norm(hidden)[0]
        if num_merged > 1:
            hidden = hidden.reshape(len(hidden) // num_merged, num_merged, -1)
            hidden = (hidden.swapaxes(1, 2) if self._by_channels else hidden).reshape(len(hidden), -1)
        for linear in self._layers:
            hidden = linear(hidden)
        return hidden


class VisionTower:
    """Encoder and projector of a decoder, ready to run.

    `weights`: the reader of the decoder, which counts them too. `progress`: the decoder's count of layers.
    """

    def __init__(self, spec: VisionSpec, weights: WeightReader, progress: NDArray[np.int64]) -> None:
        self.spec, self._back_end = spec, weights.back_end
        tower, shapes, names = spec.tower, VisionShapes.of(spec), spec.tower.weights
        own = weights.below(names.prefixes, names.embedding, names)
        assert shapes.positions is not None, "an encoder without positions"
        self._patches, positions = own.linear(shapes.patches, weight_format=DenseFormat()), own.table(shapes.positions)
        if shapes.class_token is not None:  # the first row's patch is zero: its sum is that of token and position
            table = floats(positions).copy()
            table[0] += floats(own.vector(shapes.class_token))
            positions = like(table, positions)
        self._positions = positions
        self._norm = None if shapes.pre_norm is None else make_norm(tower, own, shapes.pre_norm)
        program = build_program(tower, own, ProgramInputs({}, progress))
        require_ops(self._back_end.name, program.ops)
        require_attention(self._back_end.attention, program.ops, own.dtype)
        self._program, self.itemsize = self._back_end.fuse(program), own.dtype.itemsize
        self._cache = TextCache(tower, own.dtype, self._back_end)
        projector = weights.below(
            spec.projector_prefixes, spec.projector[0], replace(names, is_transposed=spec.is_projector_transposed)
        )
        self._projector = TowerProjector(shapes.projector, projector, tower.norm_eps, is_layer=False, offset=1.0)

    def layer_flops(self, num_tokens: int) -> float:
        """Return the operations of a layer for an image, the mean of all layers."""
        return flops(self.spec) / self.spec.tower.num_layers

    def encode(self, pixels: NDArray[np.float32]) -> Tensor:
        """Return the rows of an image [num_tokens, hidden_size], of the model's dtype.

        pixels: [channels, height, width], as `spec` says.
        """
        spec, library = self.spec, self._back_end.library
        size, grid = spec.patch_size, spec.grid
        cut = pixels.reshape(spec.num_channels, grid, size, grid, size).transpose(1, 3, 0, 2, 4)
        patches = np.zeros((grid**2 + spec.has_class_token, spec.num_channels * size**2), np.float32)
        patches[int(spec.has_class_token) :] = cut.reshape(grid**2, -1)
        x = added(self._patches(like(patches, self._positions)), self._positions)
        if self._norm is not None:
            x = self._norm(x)[0]
        num_rows = len(patches)
        batch = ForwardBatch(
            np.zeros(num_rows, np.int64), np.arange(num_rows), np.zeros(num_rows, np.int64),
            np.array([0, num_rows], np.int32), np.array([num_rows], np.int32), np.zeros((1, 1), np.int32),
        ).taken(library)  # fmt: skip
        batch, cache = self._cache.place(batch)
        metadata = build_metadata(batch.block_tables, batch.query_starts, batch.context_lens, cache.block_size)
        inputs = LayerInputs(batch.positions, batch.slot_mapping, metadata, cache.keys, cache.values)
        hidden = self._program.run(x, inputs)
        if spec.has_class_token and not spec.keeps_class_token:
            hidden = hidden[1:]
        if spec.pool > 1:
            side = grid // spec.pool
            squares = floats(hidden).reshape(side, spec.pool, side, spec.pool, -1)
            hidden = like(squares.mean((1, 3), dtype=np.float32).reshape(side**2, -1), hidden)
        return self._projector(hidden)


def flops(spec: VisionSpec) -> float:
    """Return the operations that an image takes: products of layers, projector and patches, and attention."""
    tower, shapes = spec.tower, VisionShapes.of(spec)
    num_rows = spec.grid**2 + spec.has_class_token
    attention = 4.0 * num_rows * tower.num_heads * tower.head_dim * tower.num_layers
    projector = 2.0 * spec.num_tokens * sum(shape.num_weights for shape in shapes.projector.layers)
    return num_rows * (2.0 * (num_layer_weights(tower) + shapes.patches.num_weights) + attention) + projector
