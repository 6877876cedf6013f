"""Weights of a model, counted by its spec alone: those that a token is multiplied with, and all. No torch, no file."""

from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.model.shapes import DecoderShapes, LinearShape, NormShape, Shape, TableShape, VectorShape, layer_shapes
from quire.model.spec import DecoderSpec, Experts


def num_layer_weights(spec: DecoderSpec) -> int:
    """Return the elements that a token is multiplied with: those of linear layers, without the head."""
    around = DecoderShapes.of(spec)
    shapes = (*_shapes_of_layers(spec), around.project_in, around.project_out)
    linear = (shape for shape in shapes if isinstance(shape, LinearShape))
    return int(sum(shape.num_weights * shape.share_of_tokens for shape in linear))


class ExpertReads(NamedTuple):
    """Experts as a step reads them: their number, those of one token, and their share of its `num_weights`."""

    num_experts: int
    num_active: int
    share: float
    num_weights: int  # linear layers and the head: read by a step of one token

    def weights(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights that numbers of tokens read, divided by those of one, if experts are chosen by chance."""
        unused = (1 - self.num_active / self.num_experts) ** num_tokens
        return np.asarray(1 - self.share + self.share * (1 - unused) * self.num_experts / self.num_active)


def expert_reads(spec: DecoderSpec) -> ExpertReads | None:
    """Return the experts of a model, alike in all layers that have them; None if no layer has."""
    mixtures = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, Experts)]
    if not mixtures:
        return None
    linear = [shape for shape in _shapes_of_layers(spec) if isinstance(shape, LinearShape)]
    in_experts = sum(shape.num_weights * shape.share_of_tokens for shape in linear if shape.share_of_tokens < 1)
    num_weights = num_layer_weights(spec) + spec.vocab_size * spec.embedding_size
    share = float(in_experts / num_weights)
    return ExpertReads(mixtures[0].num_experts, mixtures[0].num_active, share, num_weights)


def num_parameters(spec: DecoderSpec) -> int:
    """Return the parameters of a model, a tied head counted once."""
    *around, head = DecoderShapes.of(spec)
    num_tied = head.num_weights if spec.is_head_tied else 0
    num_head = num_elements(head) - num_tied if spec.has_head else 0
    return sum(map(num_elements, (*around, *_shapes_of_layers(spec)))) + num_head


def _shapes_of_layers(spec: DecoderSpec) -> list[Shape | None]:
    return [shape for layer in spec.layers for shape in layer_shapes(spec, layer)]


def num_elements(shape: Shape | None) -> int:
    """Return the parameters of a part of a model; 0 for None."""
    if shape is None:
        return 0
    if isinstance(shape, NormShape):
        return sum(map(prod, shape.tensors.values()))
    if isinstance(shape, TableShape):
        return shape.num_rows * shape.width
    if isinstance(shape, VectorShape):
        return shape.length
    return shape.num_weights + (sum(shape.num_rows) if shape.has_bias else 0)
