"""Images of a prompt: pixels as a processor has made them, and the placeholders that they stand at.

A prompt's token ids hold the model's image token at each placeholder, which is what the model, samplers and drafters
read. The prefix cache is told `-1 - serial` in its place: two images of one size are different prefixes, and the run's
length and place follow from the prefix itself.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec
from msgspec import structs

from quire.core.errors import InvalidRequestError
from quire.core.image_processing import ImageSettings, PreparedImage
from quire.core.token_ids import PackedTokens

MAX_SERIAL = 2**31 - 2
NUM_CHANNELS = 3    # RGB, a byte each
MAX_KEPT_BYTES = 64 << 20  # pixels in a server, and in an engine, for later requests: 190 images of LLaVA 1.5


class ImageSpan(NamedTuple):
    """The run of an image in a prompt: the image's rows stand at the image tokens in [start, start + num_tokens).

    Others, at ends of rows (Pixtral), are tokens of text: which ones they are follows from the image.
    """

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
        """Distance of the position behind the image from its index, where tokens of images have rows and columns."""
        return self.num_tokens - max(self.grid)


class PromptImage(msgspec.Struct, array_like=True, frozen=True):
    """An image of a prompt. Its pixels are 8 bits: `pixel_values` makes the encoder's input of them, where it is."""

    start: int
    num_tokens: int
    serial: int
    prepared: PreparedImage

    @property
    def span(self) -> ImageSpan:
        """The image without its pixels."""
        return ImageSpan(self.start, self.num_tokens, self.serial, self.prepared.grid)


class KeptPixels:
    """Pixels that an engine keeps for further requests, by serial, the latest used ones, at most `max_bytes`.

    Its client has the same without the pixels, `sent`: requests change both in the order in which they are sent, so the
    client knows what it need not send again.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self.images = OrderedDict[int, PreparedImage]()     # the least recently used first

    def without_kept(self, images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
        """Return the images of a request as they are sent: without pixels where the engine has them."""
        return tuple(_without_pixels(each) if each.serial in self.images else each for each in images)

    def received(self, images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
        """Keep the images of a request that was sent like that, and return them with their pixels."""
        found = tuple(
            each if each.prepared.pixels else structs.replace(each, prepared=self.images[each.serial])
            for each in images
        )
        self._keep(found)
        return found

    def sent(self, images: Sequence[PromptImage]) -> None:
        """Keep the images of a request that has been sent, without their pixels."""
        self._keep([_without_pixels(each) for each in images])

    def _keep(self, images: Sequence[PromptImage]) -> None:
        for image in images:
            if image.serial not in self.images:
                self.images[image.serial] = image.prepared
                self.num_bytes += _num_bytes(image.prepared)
            self.images.move_to_end(image.serial)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _num_bytes(self.images.popitem(last=False)[1])


def _without_pixels(image: PromptImage) -> PromptImage:
    return structs.replace(image, prepared=structs.replace(image.prepared, pixels=b""))


def _num_bytes(image: PreparedImage) -> int:
    return image.height * image.width * NUM_CHANNELS


class ImageInputs(msgspec.Struct, array_like=True, frozen=True):
    """Images that an engine accepts.

    settings: of the processor that makes the pixels, by the model's files. num_tokens: placeholders of each image;
    size: rows and columns of its pixels. Where images have any size these are 0, and those of one placeholder, or of a
    tile. cost: tokens of a step that the encoding of an image, or of a tile, is charged as, and with them `token_cost`
    for each placeholder and `pair_cost` for each pair of them. max_tokens: most placeholders of one image, what the
    encoder cache holds. is_whole: the placeholders of an image see each other, and a step computes all of them.
    """

    settings: ImageSettings
    num_tokens: int
    size: tuple[int, int]
    cost: int
    max_tokens: int
    is_whole: bool = False
    token_cost: float = 0.0
    pair_cost: float = 0.0

    def cost_of(self, image: PromptImage) -> int:
        """Return the tokens of a step that the encoding of an image is charged as."""
        if self.settings.resize == "tiles":
            return self.cost * self.settings.num_tiles(image.prepared)
        return self.cost + ceil(image.num_tokens * (self.token_cost + image.num_tokens * self.pair_cost))

    def check(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> None:
        """Raise InvalidRequestError for images that are not of this form, or not where placeholders are.

        Image tokens outside of the images' runs are text.
        """
        last, token_id = 0, self.settings.image_token_id
        for index, image in enumerate(images):
            stop = image.start + image.num_tokens
            if not last <= image.start < stop <= len(token_ids):
                raise _error(index, f"placeholders [{image.start}, {stop}) of a prompt of {len(token_ids)} tokens")
            last = stop
            if not 0 <= image.serial <= MAX_SERIAL:
                raise _error(index, f"serial must be from 0 to {MAX_SERIAL}, got {image.serial}")
            (height, width), num_tokens, found = self.size, self.num_tokens, image.prepared
            if not num_tokens:
                rows, columns = found.grid
                if min(rows, columns) < 1:
                    raise _error(index, f"must have a grid of at least 1 x 1, got {rows} x {columns}")
                num_tokens = self.settings.num_tokens(found.grid)
                if self.settings.resize == "tiles":
                    if not self.settings.has_tiles(found):
                        own = f"{found.height} x {found.width} with a grid of {rows} x {columns}"
                        raise _error(index, f"must have tiles of {height} x {width} pixels, got {own}")
                    height, width = found.height, found.width
                else:
                    height, width = rows * height, columns * width
            if num_tokens > self.max_tokens:
                raise _error(index, f"takes {num_tokens} tokens, and image_cache_memory holds {self.max_tokens}")
            num_bytes = height * width * NUM_CHANNELS
            if (found.height, found.width, len(found.pixels)) != (height, width, num_bytes):
                own = f"{found.height} x {found.width} in {len(found.pixels)} bytes"
                raise _error(index, f"pixels must be {height} x {width} in {num_bytes} bytes, got {own}")
            if image.num_tokens != num_tokens:
                raise _error(index, f"must have {num_tokens} placeholders, got {image.num_tokens}")
            run, ends = list(token_ids[image.start : stop]), list[int]()
            if self.settings.has_row_ends:
                period = found.grid[1] + 1
                ends = run[period - 1 :: period]
                del run[period - 1 :: period]
            if set(run) != {token_id} or token_id in ends:
                raise _error(index, f"placeholders [{image.start}, {stop}) must be the token {token_id}")


def cache_keys(token_ids: PackedTokens, images: Sequence[PromptImage]) -> PackedTokens:
    """Return a prompt's tokens as the prefix cache is told them: `-1 - serial` at the positions of each image."""
    keys = token_ids[:]
    for image in images:
        keys[image.start : image.start + image.num_tokens] = array("i", [-1 - image.serial]) * image.num_tokens
    return keys


def _error(index: int, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"images[{index}]: {message}", param="images")
