"""Marks of images in a conversation and in its text: which placeholder is which image, and which one was typed.

A model's chat template writes one placeholder, such as `<image>`, for each part that is an image. A client may write
the same characters, which are text. So a part that is an image has a mark as its text, which has a number and cannot
be guessed, and placeholders in texts of the conversation become another mark before the template is run. In the
rendered text each placeholder that the template wrote becomes the mark of its image, and typed ones become themselves.
An image that a template does not show has its mark as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from quire.core.errors import InvalidRequestError

IMAGE = "image"     # type of a part that is an image, as chat templates read it
_TYPED, END = "t", "\ue001"


class ImageMarks(NamedTuple):
    """Marks of one process. `secret`: how each begins, which no client knows. `placeholder`: the template's.

    `soft`: the text of an image's own tokens, where that is not the placeholder, as in Gemma 3.
    """

    placeholder: str
    secret: str
    soft: str = ""

    def mark(self, number: int) -> str:
        """Return the mark of an image."""
        return f"{self.secret}{number}{END}"

    def part(self, number: int) -> dict[str, str]:
        """Return the part of a content that is an image."""
        return {"type": IMAGE, "text": self.mark(number)}

    def is_part(self, part: object) -> bool:
        """Return whether a part of a content was made by `part`."""
        if not isinstance(part, dict) or part.get("type") != IMAGE:
            return False
        text = part.get("text")
        return isinstance(text, str) and text.startswith(self.secret)

    def typed_masked(self, value: Any) -> Any:  # noqa: ANN401 (JSON)
        """Return a JSON value with a mark in place of each placeholder in its texts."""
        if isinstance(value, str):
            for text, mark in self._typed:
                if text in value:
                    value = value.replace(text, mark)
            return value
        if isinstance(value, Mapping):
            return {self.typed_masked(name): self.typed_masked(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.typed_masked(each) for each in value]
        return value

    def placed(self, rendered: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a rendered text with the mark of each image at its place, and placeholders where they were typed.

        `messages`: those that the template was run with. None if it does not show each of their images once.
        """
        marked = [part["text"] for part in _parts(messages) if self.is_part(part)]
        shown = set(self.found(rendered))
        unseen = [mark for mark in marked if self.number(mark) not in shown]
        pieces = rendered.split(self.placeholder)
        if len(pieces) != len(unseen) + 1:
            return None
        text = "".join(f"{piece}{mark}" for piece, mark in zip(pieces, [*unseen, ""], strict=True))
        return self.typed_unmasked(text)

    def typed_unmasked(self, text: str) -> str:
        """Return a text with the placeholders that `typed_masked` has replaced."""
        for typed, mark in self._typed:
            text = text.replace(mark, typed)
        return text

    def as_texts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with each image as a text, for a template that does not show images."""
        return [_with_parts(message, self) for message in messages]

    def found(self, text: str) -> list[int]:
        """Return the numbers of the images in a text, in order."""
        return [int(number) for number in re.findall(f"{re.escape(self.secret)}([0-9]+){END}", text)]

    def number(self, mark: str) -> int:
        """Return the number of the image of a mark."""
        return int(mark[len(self.secret) : -len(END)])

    @property
    def _typed(self) -> list[tuple[str, str]]:
        """Return the texts that stand for images, each with the mark of one that a client wrote."""
        texts = (self.placeholder, self.soft) if self.soft else (self.placeholder,)
        return [(text, f"{self.secret}{_TYPED}{number}{END}") for number, text in enumerate(texts)]


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from content


def _with_parts(message: Mapping[str, Any], marks: ImageMarks) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [{"type": "text", "text": part["text"]} if marks.is_part(part) else part for part in content]
    return {**message, "content": parts}


def refuse_unshown(placeholder: str) -> NoReturn:
    """Raise InvalidRequestError for a template that writes other placeholders than those of the images."""
    raise InvalidRequestError(
        f"the model's chat template does not write {placeholder} once for each image of the messages", param="messages"
    )
