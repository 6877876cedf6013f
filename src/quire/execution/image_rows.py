"""Encoder cache of a worker, and the images of its rows: what replaces the embeddings of placeholders in a step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.core.images import ImageSpan, PromptImage
from quire.core.plan import StepPlan
from quire.kernels.tensors import Tensor, concatenated_rows
from quire.model.language_model import Embeds, ForwardBatch
from quire.model.vision import VisionTower


class ImageRows:
    """Encodings by serial, as plans say; the scheduler bounds them (`quire.scheduling.image_encodings`)."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower, self.has_encoded = tower, False       # whether the last step has encoded an image
        self._encodings = dict[int, Tensor]()              # [num_tokens, hidden_size] each
        self._images = dict[int, Sequence[ImageSpan]]()    # for each row, the images that it has not passed

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
        places, values, first = list[int](), list[Tensor](), 0
        ends = (batch.positions + 1).astype(np.int32)
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            spans = self._images.get(row, ())
            for span in spans:
                begin, end = max(start, span.start), min(start + count, span.stop)
                if begin < end:
                    own = slice(first + begin - start, first + end - start)
                    places += range(own.start, own.stop)
                    ends[own] = span.stop
                    values.append(self._encodings[span.serial][begin - span.start : end - span.start])
            if spans and spans[-1].stop <= start:
                del self._images[row]                      # positions of a row only grow
            first += count
        if not places:
            return batch
        embeds = Embeds(np.array(places, np.int64), concatenated_rows(values))
        return replace(batch, embeds=embeds, seen_ends=ends if self._tower.spec.sees_whole else None)

    def _encoded(self, image: PromptImage) -> Tensor:
        """Return the encoding of an image, in memory of its own."""
        pixels = np.frombuffer(image.pixels, np.float32).reshape(image.shape)
        return concatenated_rows([self._tower.encode(pixels)])
