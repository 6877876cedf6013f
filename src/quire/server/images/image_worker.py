"""Image process: decodes and resizes the images of requests, files of unknown origin, within limits.

Only four formats are read, the size in the header is checked before pixels are decoded, and the process has no
connection but that to the server.
"""

import binascii
import warnings
from collections.abc import Callable

import msgspec

from quire.core.errors import InvalidRequestError, NotInstalledError
from quire.core.frames import frame
from quire.core.image_processing import ImageSettings, PreparedImage, decoded, prepared
from quire.server.limits.sandbox_worker import serve_jobs

DECODE_LIMIT_S = 20.0       # 32 megapixels with transparency take 3 s on an AMD EPYC (Zen 5)


class ReadSettings(msgspec.Struct, tag="settings", array_like=True, frozen=True):
    """The first message: the settings of the model's image processor."""

    settings: ImageSettings


class DecodeImage(msgspec.Struct, tag="decode", array_like=True, frozen=True):
    """An image file, or its base64 text. `max_pixels`: of its header."""

    data: bytes
    is_base64: bool
    max_pixels: int


class SettingsRead(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """The answer to `ReadSettings`."""


class ImageDecoded(msgspec.Struct, tag="decoded", array_like=True, frozen=True):
    """The answer to a job. `num_pixels`: of the image in the file."""

    image: PreparedImage
    num_pixels: int


class ImageRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Error of an image that cannot be used."""

    message: str


ImageReply = SettingsRead | ImageDecoded | ImageRefused

_decode_command: Callable[[bytes], ReadSettings | DecodeImage] = msgspec.msgpack.Decoder(
    ReadSettings | DecodeImage
).decode
decode_reply: Callable[[bytes], ImageReply] = msgspec.msgpack.Decoder(ImageReply).decode


class ImageJobs:
    """The settings, once they are read, and the answers to commands."""

    def __init__(self) -> None:
        self._settings: ImageSettings | None = None

    def answer(self, body: bytes) -> bytes:
        """Return the frame of the reply to a command. MemoryError when memory runs out."""
        command = _decode_command(body)
        if isinstance(command, ReadSettings):
            self._settings = command.settings
            return frame(SettingsRead())
        assert self._settings is not None, "the first command must be ReadSettings"
        try:
            return frame(_decoded(command, self._settings))
        except (InvalidRequestError, NotInstalledError) as error:
            return frame(ImageRefused(str(error)))


def _decoded(job: DecodeImage, settings: ImageSettings) -> ImageDecoded:
    try:
        data = binascii.a2b_base64(job.data, strict_mode=True) if job.is_base64 else job.data
    except ValueError as error:
        raise InvalidRequestError(f"is no base64 without blanks: {error}") from error
    image = decoded(data, job.max_pixels)
    return ImageDecoded(prepared(image, settings), image.width * image.height)


if __name__ == "__main__":
    warnings.simplefilter("ignore")     # Pillow's, on metadata that is not read
    serve_jobs(ImageJobs().answer, DECODE_LIMIT_S)
