"""Images of a prompt: pixels as a processor has made them, and the placeholders that they stand at.

A prompt's token ids hold the model's image token at each placeholder, which is what the model, samplers and drafters
read. The prefix cache is told `-1 - serial` in its place: two images of one size are different prefixes, and the run's
length and place follow from the prefix itself.
"""

from array import array
from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

import msgspec

from quire.core.errors import InvalidRequestError
from quire.core.image_processing import ImageSettings
from quire.core.token_ids import PackedTokens

MAX_SERIAL = 2**31 - 2
PIXEL_BYTES = 4  # float32


class ImageSpan(NamedTuple):
    """The run of an image in a prompt: the image's rows stand at the image tokens in [start, start + num_tokens)."""

    start: int
    num_tokens: int
    serial: int         # the image's number: equal serials are equal pixels, under one cache_salt
    grid: tuple[int, int] = (0, 0)  # rows and columns of merged patches

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.num_tokens

    @property
    def shift(self) -> int:
        """How far the position of what follows is behind its index, where tokens of images have rows and columns."""
        return self.num_tokens - max(self.grid)


class PromptImage(msgspec.Struct, array_like=True, frozen=True):
    """An image of a prompt.

    `shape`: of the pixels, float32, C-contiguous, in the machine's byte order: LLaVA's [3, height, width].
    """

    start: int
    num_tokens: int
    serial: int
    grid: tuple[int, int]
    shape: tuple[int, ...]
    pixels: bytes

    @property
    def span(self) -> ImageSpan:
        """The image without its pixels."""
        return ImageSpan(self.start, self.num_tokens, self.serial, self.grid)


class ImageInputs(msgspec.Struct, array_like=True, frozen=True):
    """Images that an engine accepts.

    family: of the processor that makes the pixels. num_tokens: placeholders of each image; shape: of its pixels. Where
    images have any size these are 0 and, for each of its placeholders, [channels, rows, columns]. cost: tokens of a
    step that the encoding of an image is charged as, and with them `token_cost` for each placeholder and `pair_cost`
    for each pair of them. max_tokens: most placeholders of one image, what the encoder cache holds. is_whole: the
    placeholders of an image see each other, and a step computes all of them. settings: of the processor, by the
    model's files; None: requests of clients have no images.
    """

    family: str
    image_token_id: int
    num_tokens: int
    shape: tuple[int, ...]
    cost: int
    max_tokens: int
    is_whole: bool = False
    settings: ImageSettings | None = None
    token_cost: float = 0.0
    pair_cost: float = 0.0

    def cost_of(self, num_tokens: int) -> int:
        """Return the tokens of a step that the encoding of an image with so many placeholders is charged as."""
        return self.cost + ceil(num_tokens * (self.token_cost + num_tokens * self.pair_cost))

    def check(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> None:
        """Raise InvalidRequestError for images that are not of this form, or not where placeholders are.

        Image tokens outside of the images' runs are text.
        """
        last = 0
        for index, image in enumerate(images):
            stop = image.start + image.num_tokens
            if not last <= image.start < stop <= len(token_ids):
                raise _error(index, f"placeholders [{image.start}, {stop}) of a prompt of {len(token_ids)} tokens")
            last = stop
            if not 0 <= image.serial <= MAX_SERIAL:
                raise _error(index, f"serial must be from 0 to {MAX_SERIAL}, got {image.serial}")
            shape, num_tokens = self.shape, self.num_tokens
            if not num_tokens:
                rows, columns = image.grid
                if min(rows, columns) < 1:
                    raise _error(index, f"must have a grid of at least 1 x 1, got {rows} x {columns}")
                shape, num_tokens = (shape[0], rows * shape[1], columns * shape[2]), rows * columns
            if num_tokens > self.max_tokens:
                raise _error(index, f"takes {num_tokens} tokens, and image_cache_memory holds {self.max_tokens}")
            if tuple(image.shape) != shape or len(image.pixels) != prod(shape) * PIXEL_BYTES:
                found = f"{list(image.shape)} in {len(image.pixels)} bytes"
                raise _error(index, f"pixels must be float32 {list(shape)}, got {found}")
            if image.num_tokens != num_tokens:
                raise _error(index, f"must have {num_tokens} placeholders, got {image.num_tokens}")
            if set(token_ids[image.start : stop]) != {self.image_token_id}:
                raise _error(index, f"placeholders [{image.start}, {stop}) must be the token {self.image_token_id}")


def cache_keys(token_ids: PackedTokens, images: Sequence[PromptImage]) -> PackedTokens:
    """Return a prompt's tokens as the prefix cache is told them: `-1 - serial` at the positions of each image."""
    keys = token_ids[:]
    for image in images:
        keys[image.start : image.start + image.num_tokens] = array("i", [-1 - image.serial]) * image.num_tokens
    return keys


def _error(index: int, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"images[{index}]: {message}", param="images")
