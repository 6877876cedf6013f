"""Image encodings: what the worker's encoder cache holds, and what each step encodes for the placeholders it computes.

A step that computes a placeholder of an image encodes the image first, unless the cache has it: the least recently used
ones are dropped for it, none that the step uses. That costs the step tokens. The first image of a step is encoded
whatever it costs if no token before it is left, so prompts always advance; others only within the budget. Pixels stay
with their request until it ends: a preempted one may have to encode again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.core.images import ImageInputs, PromptImage
from quire.scheduling.plan_builder import PlanBuilder


class ImageEncodings:
    """The encoder cache of a worker, by serial, of at most `inputs.max_tokens` rows."""

    def __init__(self, inputs: ImageInputs) -> None:
        self.inputs = inputs
        self.num_tokens = self.num_encoded = self.num_found = 0  # rows now; images since start
        self._held = OrderedDict[int, int]()    # rows of each image, the least recently used first
        self._step: PlanBuilder | None = None   # the step of the next two
        self._used = dict[int, int]()           # rows of each image that it reads
        self._lost = list[int]()                # the worker may have them, after a failed step

    def fit(
        self, step: PlanBuilder, images: Sequence[PromptImage], start: int, count: int, budget: int
    ) -> tuple[int, int]:
        """Plan the encodings for the positions [start, start + count) of a sequence, within a budget of tokens.

        Returns how many of these tokens the step computes, and what their encodings cost, in tokens. Where an image
        cannot be cut, that may be more than were asked for, and more than the budget, by less than one image.
        """
        if self._step is not step:
            self._step, self._used = step, {}
            step.plan.dropped_images.extend(self._lost)
            self._lost.clear()
        cost = 0
        for image in images:
            if image.start + image.num_tokens <= start:
                continue
            if image.start >= start + count:
                break
            if image.serial in self._held:
                self._held.move_to_end(image.serial)
                self._used[image.serial] = image.num_tokens
                self.num_found += start <= image.start
                continue
            is_first, own = not step.plan.encodings and image.start <= start, self.inputs.cost_of(image)
            if not (is_first or cost + own < budget) or not self._make_room(step, image.num_tokens):
                count = max(0, image.start - start)
                break
            self._held[image.serial] = self._used[image.serial] = image.num_tokens
            self.num_tokens += image.num_tokens
            self.num_encoded += 1
            step.plan.encodings.append(image)
            cost += own
            count = min(count, max(1, budget - cost))
        return self._without_parts(images, start, count) if self.inputs.is_whole else count, cost

    @staticmethod
    def _without_parts(images: Sequence[PromptImage], start: int, count: int) -> int:
        """Return how many tokens from `start` on end in no image: past one that they begin in, else before it."""
        for image in images:
            stop = image.start + image.num_tokens
            if count and image.start < start + count < stop:
                return stop - start if image.start <= start else image.start - start
        return count

    def _make_room(self, step: PlanBuilder, num_tokens: int) -> bool:
        """Drop images until `num_tokens` more rows fit; False, and none dropped, if the step uses too many."""
        most = self.inputs.max_tokens - num_tokens
        if sum(self._used.values()) > most:
            return False
        for serial in list(self._held):
            if self.num_tokens <= most:
                break
            if serial not in self._used:
                self.num_tokens -= self._held.pop(serial)
                step.plan.dropped_images.append(serial)
        return True

    def undo(self, steps: Iterable[PlanBuilder]) -> None:
        """Forget what failed steps were to encode: the worker may have it, or not."""
        for step in steps:
            self._lost += step.plan.dropped_images
            for image in step.plan.encodings:
                self._lost.append(image.serial)
                self.num_tokens -= self._held.pop(image.serial, 0)
        self._step = None

    def stats(self) -> dict[str, int]:
        """Return the rows that the cache holds; since start, images that steps needed and those that it had."""
        return {"rows": self.num_tokens, "queries": self.num_found + self.num_encoded, "hits": self.num_found}

    def check(self) -> None:
        """Assert that rows are counted and within the bound."""
        assert self.num_tokens == sum(self._held.values()) <= self.inputs.max_tokens
