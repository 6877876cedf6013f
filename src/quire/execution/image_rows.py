"""Encoder cache of a worker, and the images of its rows: what replaces the embeddings of placeholders in a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.core.image_processing import ImageSettings, pixel_values
from quire.core.images import ImageSpan, PromptImage
from quire.core.plan import StepPlan
from quire.kernels.tensors import Tensor, concatenated_rows
from quire.model.language_model import Embeds, ForwardBatch
from quire.model.merging_vision import MergingTower
from quire.model.tiled_vision import TiledTower
from quire.model.vision import VisionTower


class ImageRows:
    """Encodings by serial, as plans say; the scheduler bounds them (`quire.scheduling.image_encodings`)."""

    def __init__(self, tower: VisionTower | MergingTower | TiledTower, settings: ImageSettings) -> None:
        self._tower, self._settings = tower, settings
        self.has_encoded = False                           # whether the last step has encoded an image
        self._has_places = tower.spec.has_places           # tokens of images are at rows and columns
        self._encodings = dict[int, Tensor]()              # [num_tokens, hidden_size] each
        # For each row, the images that it has not passed, or with places all: they shift the positions behind.
        self._images = dict[int, Sequence[ImageSpan]]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all encodings."""
        return sum(each.nbytes for each in self._encodings.values())

    def apply(self, plan: StepPlan, batch: ForwardBatch) -> ForwardBatch:
        """Apply what a plan says of images; return its batch with the rows of images in place of embeddings."""
        for serial in plan.dropped_images:
            self._encodings.pop(serial, None)
        self.has_encoded = bool(plan.encodings)
        for image in plan.encodings:
            self._encodings[image.serial] = self._encoded(image)
        for new in plan.new_rows:
            if new.images:
                self._images[new.row] = new.images
            else:
                self._images.pop(new.row, None)
        if self._images.keys().isdisjoint(plan.rows):
            return batch    # a row that has ended inside of its prompt stays until it has another owner
        return self._placed(plan, batch)

    def _placed(self, plan: StepPlan, batch: ForwardBatch) -> ForwardBatch:
        """Return a batch with the rows of images, and the positions of tokens in and behind them."""
        places, values, first = list[int](), list[Tensor](), 0
        ends, positions, grids = (batch.positions + 1).astype(np.int32), batch.positions, list[NDArray[np.int64]]()
        if self._has_places:
            positions = positions.copy()
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            spans, shift = self._images.get(row, ()), 0
            for span in spans:
                begin, end = max(start, span.start), min(start + count, span.stop)
                if begin < end:
                    own = slice(first + begin - start, first + end - start)
                    inside, encoded = self._inside(span, begin, end)
                    places += (own.start + inside).tolist()
                    ends[own] = span.stop
                    values.append(self._encodings[span.serial][encoded])
                    if self._has_places:
                        grids.append(_places(span, shift, begin, end))
                if self._has_places:
                    positions[first + max(0, span.stop - start) : first + count] -= span.shift
                    shift += span.shift
            if spans and spans[-1].stop <= start and not self._has_places:
                del self._images[row]                      # positions of a row only grow
            first += count
        if not places:
            return replace(batch, positions=positions) if self._has_places else batch
        embeds = Embeds(
            np.array(places, np.int64), concatenated_rows(values), np.concatenate(grids, axis=1) if grids else None
        )
        ends_seen = ends if self._tower.spec.sees_whole else None
        return replace(batch, positions=positions, embeds=embeds, seen_ends=ends_seen)

    def _inside(self, span: ImageSpan, begin: int, end: int) -> tuple[NDArray[np.int64], slice]:
        """Return which positions of [begin, end) in a run have rows of its image, from `begin` on, and which rows."""
        numbers = np.arange(begin - span.start, end - span.start)
        if not self._settings.has_row_ends:
            return numbers - numbers[0], slice(begin - span.start, end - span.start)
        period = span.grid[1] + 1
        first, last = (place - place // period for place in (begin - span.start, end - span.start))
        return np.flatnonzero(numbers % period < span.grid[1]), slice(first, last)

    def _encoded(self, image: PromptImage) -> Tensor:
        """Return the encoding of an image, in memory of its own."""
        values = pixel_values(self._settings, image.prepared)
        if isinstance(self._tower, TiledTower):
            return self._tower.encode(values, image.prepared.grid)
        return concatenated_rows([self._tower.encode(values)])


def _places(span: ImageSpan, shift: int, begin: int, end: int) -> NDArray[np.int64]:
    """Return the time, row and column of tokens [begin, end) of an image, [3, end - begin] (Wang et al. 2024, 2.1).

    `shift`: how much less positions in front of the image are than their indexes.
    """
    rows, columns = np.divmod(np.arange(begin, end) - span.start, span.grid[1])
    return span.start - shift + np.stack([np.zeros_like(rows), rows, columns])
