"""Encoder cache of a worker, and the images of its rows: what replaces the embeddings of placeholders in a step."""

from collections.abc import Sequence

import numpy as np

from quire.core.images import ImageSpan, PromptImage
from quire.core.plan import StepPlan
from quire.kernels.tensors import Tensor, concatenated_rows
from quire.model.language_model import Embeds
from quire.model.vision import VisionTower


class ImageRows:
    """Encodings by serial, as plans say; the scheduler bounds them (`quire.scheduling.image_encodings`)."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._encodings = dict[int, Tensor]()              # [num_tokens, hidden_size] each
        self._images = dict[int, Sequence[ImageSpan]]()    # by row: those that the row has not passed

    @property
    def num_bytes(self) -> int:
        """Bytes of all encodings."""
        return sum(each.nbytes for each in self._encodings.values())

    def of_step(self, plan: StepPlan) -> Embeds | None:
        """Apply what a plan says of images; return the rows of its tokens that are of images, None if none is."""
        for serial in plan.dropped_images:
            self._encodings.pop(serial, None)
        for image in plan.encodings:
            self._encodings[image.serial] = self._encoded(image)
        for new in plan.new_rows:
            if new.images:
                self._images[new.row] = new.images
            else:
                self._images.pop(new.row, None)
        if not self._images:
            return None
        places, values, first = list[int](), list[Tensor](), 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            spans = self._images.get(row, ())
            for span in spans:
                begin, end = max(start, span.start), min(start + count, span.stop)
                if begin < end:
                    places += range(first + begin - start, first + end - start)
                    values.append(self._encodings[span.serial][begin - span.start : end - span.start])
            if spans and spans[-1].stop <= start:
                del self._images[row]                      # positions of a row only grow
            first += count
        return Embeds(np.array(places, np.int64), concatenated_rows(values)) if places else None

    def _encoded(self, image: PromptImage) -> Tensor:
        """Return the encoding of an image, in memory of its own."""
        pixels = np.frombuffer(image.pixels, np.float32).reshape(image.shape)
        return concatenated_rows([self._tower.encode(pixels)])
