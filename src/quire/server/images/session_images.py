"""Images in the messages of sessions: numbered in an open one, by their places among the prompt's in a saved one."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import encode

from quire.core.images import PromptImage
from quire.engine.requests.image_prompts import NumberedImage
from quire.server.errors import invalid
from quire.server.images.image_inputs import ImagePart, with_parts
from quire.server.options import ServerOptions
from quire.text.conversation import Message

_SAVED = "session_image"    # the type of a part, which no client can write


def kept_messages(messages: Sequence[Message], numbered: Sequence[NumberedImage]) -> list[Message]:
    """Return messages that keep their images: as `ImageDecoder.numbered` has returned them, in order."""
    images = iter(numbered)
    return with_parts(messages, lambda part: ImagePart("session_id", "", next(images)))


def saved_messages(messages: Sequence[Message], images: Sequence[PromptImage]) -> list[dict[str, Any]]:
    """Return messages as JSON: a number, of an image of the prompt with the same pixels, in place of each image."""
    numbers = {image.serial: number for number, image in enumerate(images)}

    def described(part: ImagePart) -> object:
        assert part.kept is not None, "an image of an open session is kept"
        return _saved_part(numbers[part.kept.serial])

    return [dict(each) for each in with_parts(messages, described)]


def _saved_part(number: int) -> dict[str, Any]:
    return {"type": _SAVED, "image": number}


def restored_messages(messages: list[dict[str, Any]] | None, images: Sequence[PromptImage]) -> list[Message] | None:
    """Return what `saved_messages` was given, of an open session. ValueError for an image that it has not."""
    return None if messages is None else [_restored(message, images) for message in messages]


def _restored(message: dict[str, Any], images: Sequence[PromptImage]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = list[object]()
    for part in content:
        if isinstance(part, dict) and part.get("type") == _SAVED:
            number = part.get("image")
            if not isinstance(number, int) or not 0 <= number < len(images):
                raise ValueError(f"a message has image {number!r} of {len(images)}")
            found = images[number]
            part = ImagePart("session_id", "", NumberedImage(found.serial, found.prepared))  # noqa: PLW2901
        parts.append(part)
    return {**message, "content": parts}


def check_messages(messages: Sequence[Message], options: ServerOptions) -> None:
    """Raise ApiError 400 for messages of more than max_session_bytes, without their images."""
    num_bytes, most = len(encode(with_parts(messages, lambda _: _saved_part(0)))), options.max_session_bytes
    if num_bytes > most:
        invalid(f"the messages of the session take {num_bytes} bytes, at most {most} (max_session_bytes)",
                param="messages")  # fmt: skip


def check_pixels(images: Sequence[NumberedImage], options: ServerOptions) -> None:
    """Raise ApiError 400 for images of more than max_session_image_bytes; equal ones count once."""
    num_bytes = sum({each.serial: len(each.prepared.pixels) for each in images}.values())
    if num_bytes > (most := options.max_session_image_bytes):
        invalid(f"the images of the session take {num_bytes} bytes, at most {most} (max_session_image_bytes)",
                param="messages")  # fmt: skip
