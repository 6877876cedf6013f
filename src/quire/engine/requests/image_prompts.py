"""Images in prompts: identity by pixels, and the tokens of their placeholders.

Equal pixels under one salt have one serial number, which the prefix cache and the encoder cache know an image by. The
table of numbers is a bounded LRU: a forgotten image gets a new number, so that the caches miss, and no number is given
twice.
"""

import re
import secrets
from array import array
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError, ModelError
from quire.core.image_processing import (
    MAX_IMAGE_PIXELS,
    ImageSettings,
    PreparedImage,
    as_rgb,
    decoded,
    prepared,
)
from quire.core.images import MAX_SERIAL, PromptImage
from quire.core.token_ids import PackedTokens
from quire.text.conversation import Message
from quire.text.image_marks import END, ImageMarks
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_KNOWN_IMAGES = 1 << 16      # 12 MB
ROW_ENDS = "[IMG_BREAK]", "[IMG_END]"  # behind a row of an image's tokens, and behind the last one
GEMMA3_ENDS = (("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>"))  # GGUF files do not name them
_ANCHOR = "a"


class NumberedImage(NamedTuple):
    """An image as the model gets it, and the serial number of its pixels."""

    serial: int
    prepared: PreparedImage


def image_key(image: PreparedImage, cache_salt: str | None = None) -> bytes:
    """Return what stands for pixels under a salt, and for no others. Takes 0.5 to 2.5 ms for a megabyte of them.

    Under two salts equal pixels have two numbers: no client learns by the time of an answer what another has sent.
    """
    return salted_digest(cache_salt, b"%d %d %d %d " % (image.height, image.width, *image.grid), image.pixels)


def salted_digest(cache_salt: str | None, *parts: bytes) -> bytes:
    """Return the digest of bytes under a salt."""
    digest = sha256(b"" if cache_salt is None else sha256(cache_salt.encode(errors="surrogatepass")).digest())
    for part in parts:
        digest.update(part)
    return digest.digest()


class ImagePrompts:
    """Numbers of images, their marks in rendered conversations, and their placeholders in tokens.

    `placed` may be called from any thread.
    """

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        soft = _special(tokenizer, settings.image_token_id)
        if settings.family == "gemma3":
            begin, end = (tokenizer.named_tokens.get(name, text) for name, text in GEMMA3_ENDS)
            begin_id = tokenizer.token_id(begin)
            if begin_id is None or tokenizer.token_id(end) is None:
                raise ModelError(f"the tokenizer of a Gemma 3 must have a boi_token {begin} and an eoi_token {end}")
            self.marks = ImageMarks(begin, f"\ue000{secrets.token_hex(8)}:", soft)
            self._text = f"\n\n{begin}{soft}{end}\n\n"
        else:
            begin_id = settings.image_token_id
            self.marks = ImageMarks(soft, f"\ue000{secrets.token_hex(8)}:")
            self._text = soft
        ends = [tokenizer.token_id(text) for text in ROW_ENDS] if settings.has_row_ends else []
        self._row_ends = [each for each in ends if each is not None]
        if len(self._row_ends) < len(ends):
            raise ModelError(f"the tokenizer of a Pixtral must have the tokens {' and '.join(ROW_ENDS)}")
        # What stands for an image, and its token: the template's placeholder, and the image's own.
        self._reserved = {self.marks.placeholder: begin_id, soft: settings.image_token_id}
        self._typed_tokens = {text: _text_tokens(tokenizer, text) for text in self._reserved}
        mark = f"{re.escape(self.marks.secret)}([0-9]+){END}"
        self._mark = re.compile(mark)
        self._special = re.compile("|".join([mark, *map(re.escape, self._reserved)]))
        self._serials: OrderedDict[bytes, int] = OrderedDict()
        self._num_given = 0

    def numbered(self, image: PreparedImage, key: bytes) -> NumberedImage:
        """Return an image with the number of its `image_key`. Called from one thread."""
        serial = self._serials.get(key)
        if serial is None:
            if self._num_given > MAX_SERIAL:
                raise InvalidRequestError(f"the server has numbered {MAX_SERIAL} images: restart it", param="messages")
            serial = self._num_given
            self._num_given += 1
            self._serials[key] = serial
            if len(self._serials) > MAX_KNOWN_IMAGES:
                self._serials.popitem(last=False)
        self._serials.move_to_end(key)
        return NumberedImage(serial, image)

    def taken(self, messages: Sequence[Message]) -> tuple[list[Message], list[NumberedImage]]:
        """Return messages of a caller in this process with marks in place of its images, and the images.

        An image is a part of a content, `{"type": "image", "image": ...}` with an image of Pillow, or the path of a
        file, `{"type": "image_pil", "image_pil": ...}`, or an `image_url` with a data: URL. InvalidRequestError names
        one that cannot be read.
        """
        images = list[NumberedImage]()
        taken = list[Message]()
        for number, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list | tuple):
                parts = list[object]()
                for index, part in enumerate(content):
                    image = _own_image(f"messages[{number}].content[{index}]", part)
                    if image is not None:
                        own = prepared(image, self.settings)
                        images.append(self.numbered(own, image_key(own)))
                    parts.append(part if image is None else self.marks.part(len(images) - 1))
                message = {**message, "content": parts}  # noqa: PLW2901
            taken.append(message)
        return taken, images

    def needs_places(self, text: str) -> bool:
        """Return whether a rendered text has a placeholder, or the mark of an image."""
        return self.marks.secret in text or any(each in text for each in self._reserved)

    def written(self, text: str) -> str:
        """Return a rendered text with one placeholder in place of each mark, and what is around it."""
        return self._mark.sub(self._text, text)

    def placed(
        self, text: str, token_ids: PackedTokens, images: Sequence[NumberedImage]
    ) -> tuple[PackedTokens, tuple[PromptImage, ...]]:
        """Return the tokens of a text with the placeholders of its images, and the images with their places.

        `text` has the marks of the images, and `token_ids` are the tokens of `written(text)`. InvalidRequestError if
        the marks are not those of the images, each once.
        """
        found = self.marks.found(text)
        if sorted(found) != list(range(len(images))):
            raise InvalidRequestError(
                f"the model's chat template writes {len(found)} of {len(images)} images, or one of them twice",
                param="messages",
            )
        expected = self._expected(text, images)
        placed, spans = array("i"), list[PromptImage]()
        begin = 0
        for at in _places(token_ids, set(self._reserved.values())):
            token_id, meant = next(expected, (None, None))
            if token_id != token_ids[at]:
                raise _unplaced(self.marks.placeholder)
            placed += token_ids[begin:at]
            begin = at + 1
            if isinstance(meant, NumberedImage):
                image = self._placed(meant, len(placed))
                spans.append(image)
                placed += self._run(token_id, image)
            else:
                placed += array("i", [token_id]) if meant is None else meant
        if next(expected, None) is not None:
            raise _unplaced(self.marks.placeholder)
        placed += token_ids[begin:]
        return placed, tuple(spans)

    def _placed(self, image: NumberedImage, start: int) -> PromptImage:
        return PromptImage(start, self.settings.num_tokens(image.prepared.grid), image.serial, image.prepared)

    def _run(self, token_id: int, image: PromptImage) -> PackedTokens:
        """Return the tokens of an image."""
        if not self._row_ends:
            return array("i", [token_id]) * image.num_tokens
        rows, columns = image.prepared.grid
        row_end, end = self._row_ends
        run = (array("i", [token_id]) * columns + array("i", [row_end])) * rows
        run[-1] = end
        return run

    def _expected(
        self, text: str, images: Sequence[NumberedImage]
    ) -> Iterator[tuple[int, NumberedImage | PackedTokens | None]]:
        """Yield the reserved tokens of a text in order, each with what it stands for.

        That is an image, or the tokens of a text that a client wrote; None: the token itself.
        """
        for match in self._special.finditer(text):
            if match[1] is None:
                yield self._reserved[match[0]], self._typed_tokens[match[0]]
                continue
            if self.marks.soft:
                yield self._reserved[self.marks.placeholder], None
            yield self.settings.image_token_id, images[int(match[1])]


def _own_image(where: str, part: object) -> "Image | None":
    """Return the image of a part of a caller in this process, as RGB; None for another part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("image", "image_pil", "image_url"):
        return None
    value = part.get(kind)
    try:
        if kind == "image_url":
            url = value.get("url") if isinstance(value, dict) else value
            head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
            if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
                raise InvalidRequestError(f"must have a data: URL of an image as base64, got {shown(url)}")
            return decoded(b64decode(data, validate=True), MAX_IMAGE_PIXELS)
        if isinstance(value, str | PathLike):
            return decoded(Path(value).read_bytes(), MAX_IMAGE_PIXELS)
        if not callable(getattr(value, "getbands", None)):
            raise InvalidRequestError(f"must have an image of Pillow or the path of a file, got {shown(value)}")
        return as_rgb(value)  # type: ignore[arg-type]
    except (InvalidRequestError, OSError, ValueError) as error:
        raise InvalidRequestError(f"{where} {error}", param="messages") from error


def _places(token_ids: PackedTokens, reserved: set[int]) -> list[int]:
    """Return where reserved tokens are."""
    ids = np.frombuffer(token_ids, np.int32)
    return np.flatnonzero(np.logical_or.reduce([ids == each for each in reserved])).tolist()


def _special(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of an image's token. ModelError for one that is no special token of the tokenizer."""
    text = tokenizer.token_piece(token_id)
    if not text or tokenizer.encode(text, add_special_tokens=False) != [token_id]:
        raise ModelError(f"image_token_id {token_id} of config.json is no special token of the tokenizer")
    return text


def _unplaced(placeholder: str) -> InvalidRequestError:
    message = f"the tokens of the prompt do not have {placeholder} where its text has"
    return InvalidRequestError(message, param="messages")


def _text_tokens(tokenizer: Tokenizer, special: str) -> PackedTokens:
    """Return the tokens of a special token's characters as text: of two halves, none of which is that token."""
    tokens = array("i")
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    half = len(special) // 2
    for part in (special[:half], special[half:]):
        ids = tokenizer.encode(_ANCHOR + part, add_special_tokens=False)
        joins = ids[: len(anchor)] != anchor
        tokens.extend(tokenizer.encode(part, add_special_tokens=False) if joins else ids[len(anchor) :])
    return tokens
