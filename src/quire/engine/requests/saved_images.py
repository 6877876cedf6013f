"""Images of a saved session: their places and digests in `session.json`, and their pixels in a file beside it.

Pixels are kept as the model gets them, 8 bits a value: what is not in the store has to be computed, the tokens behind
the last full block at least, and the model reads an image's placeholders as the encoding of its pixels. Equal pixels
are written once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.core.image_processing import PreparedImage
from quire.core.images import NUM_CHANNELS, PromptImage
from quire.engine.requests.image_prompts import NumberedImage

PIXELS = "images"   # the file


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image of a session's tokens, [start, start + num_tokens). `digest`: SHA-256 of its pixels."""

    start: int
    num_tokens: int
    height: int
    width: int
    rows: int       # of its grid
    columns: int
    digest: str

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is no integer, and for an image without pixels."""
        for name in ("start", "num_tokens", "height", "width", "rows", "columns"):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"{name} of an image must be an integer, got {shown(value)}")
        if min(self.height, self.width) < 1:
            raise ValueError(f"an image has {self.height} x {self.width} pixels")

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels."""
        return self.height * self.width * NUM_CHANNELS


def saved_images(images: Sequence[PromptImage]) -> list[SavedImage]:
    """Return the descriptions of a prompt's images. Takes 0.5 to 2.5 ms for a megabyte of pixels."""
    return [
        SavedImage(
            each.start, each.num_tokens, each.prepared.height, each.prepared.width, *each.prepared.grid,
            sha256(each.prepared.pixels).hexdigest(),
        )
        for each in images
    ]  # fmt: skip


def distinct_pixels(images: Sequence[PromptImage]) -> list[bytes]:
    """Return the pixels of a prompt's images in the order in which they are written, equal ones once."""
    return list({each.prepared.pixels: None for each in images})


def num_pixel_bytes(images: Sequence[SavedImage]) -> int:
    """Return the bytes of the pixels of a saved session."""
    return sum({each.digest: each.num_bytes for each in images}.values())


def read_images(folder: Path, images: Sequence[SavedImage]) -> list[PreparedImage]:
    """Return the images of a saved session. OSError or ValueError if they are not what was written."""
    if not images:
        return []
    by_digest, sizes = dict[str, bytes](), {each.digest: each.num_bytes for each in images}
    num_bytes = num_pixel_bytes(images)
    with (folder / PIXELS).open("rb") as file:
        if (found := os.fstat(file.fileno()).st_size) != num_bytes:
            raise ValueError(f"the file of its images has {found} bytes, not {num_bytes}")
        for number, (digest, own_bytes) in enumerate(sizes.items()):
            pixels = file.read(own_bytes)
            if sha256(pixels).hexdigest() != digest:
                raise ValueError(f"the pixels of image {number} are spoilt")
            by_digest[digest] = pixels
    return [
        PreparedImage(each.height, each.width, (each.rows, each.columns), by_digest[each.digest]) for each in images
    ]


def placed_images(
    images: Sequence[SavedImage], numbered: Sequence[NumberedImage]
) -> tuple[PromptImage, ...]:
    """Return the images of a restored session, with the numbers that they have here."""
    return tuple(
        PromptImage(each.start, each.num_tokens, own.serial, own.prepared)
        for each, own in zip(images, numbered, strict=True)
    )


def images_before(images: Sequence[PromptImage], at: int) -> tuple[PromptImage, ...]:
    """Return the images of a prompt's first `at` tokens. InvalidRequestError if these end inside of one."""
    before = tuple(each for each in images if each.start < at)
    for each in before:
        if (stop := each.start + each.num_tokens) > at:
            where = f"inside of the image of tokens {each.start} to {stop - 1}"
            raise InvalidRequestError(f"at must not be {where}, got {at}", param="at")
    return before
