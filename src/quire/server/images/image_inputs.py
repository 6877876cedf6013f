"""Images of requests: parts of a conversation, and what they are to the model.

Each image is decoded by a process with limits, one at a time, in which clients get turns in rotation. A request's
images are bounded in number, bytes and pixels before they are decoded, and in memory until its answer is complete.
Agents send all images of a conversation again in each turn: the latest decoded ones are kept, and found by their files.
"""

import asyncio
import re
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from quire.core.checks import shown
from quire.core.frames import frame
from quire.core.image_processing import ImageSettings
from quire.core.images import MAX_KEPT_BYTES
from quire.engine.requests.image_prompts import ImagePrompts, NumberedImage, image_key, salted_digest
from quire.server.errors import invalid
from quire.server.images import image_worker as worker
from quire.server.images.image_worker import DecodeImage, ImageRefused, ReadSettings
from quire.server.limits.fair_semaphore import FairSemaphore
from quire.server.limits.sandbox import JobLimitError, SandboxEndedError, SandboxKind, SandboxLane
from quire.server.options import ServerOptions
from quire.text.conversation import Message, is_image, part_problem
from quire.text.image_marks import ImageMarks

if TYPE_CHECKING:
    from quire.server.images.fetching import ImageFetcher

MAX_FETCHES = 4                 # at a time, each with an image in memory until it is decoded
PIXEL_BYTES = 4                 # decoded: Pillow's RGB has as many as its RGBA
DIGEST_BYTES = 1 << 20          # past this the digest is taken in a thread: 0.5 ms on an AMD EPYC (Zen 4)
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
DETAILS = ("auto", "low", "high", "original")
_MAX_HEAD_CHARS = 128
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_HEAD = re.compile(r"data:(image/(?:png|jpe?g|webp|gif))(?:;[\w.+-]+=[\w.+-]*)*;base64", re.IGNORECASE | re.ASCII)
_IMAGES = SandboxKind("image", worker.__name__, worker.DECODE_LIMIT_S, max_reply_bytes=128 << 20)


T = TypeVar("T")


class ImagePart(NamedTuple):
    """An image in the content of a message. `where`: its place in the body, for errors. `url`: https or data.

    `kept`: the image of a session, which is decoded and numbered.
    """

    where: str
    url: str
    kept: NumberedImage | None = None


# --- parts of bodies --------------------------------------------------------------------------------------------------


def image_url_part(where: str, part: Mapping[str, Any]) -> ImagePart:
    """Return the image of a part of a chat, `image_url`, or of an input, `input_image`. ApiError 400 if it has none."""
    value = part.get("image_url")
    given = value if isinstance(value, dict) else {"url": value, "detail": part.get("detail")}
    for name in ("file_id", "uuid"):
        if part.get(name) is not None:
            _refuse(where, f"has a {name}, but this server stores no files: send the image itself")
    unknown = given.keys() - {"url", "detail"}
    if unknown:
        _refuse(where, f"has unknown fields: {shown(', '.join(sorted(map(str, unknown))))}")
    detail = given.get("detail")
    if detail is not None and detail not in DETAILS:
        _refuse(where, f"must have a detail that is one of {', '.join(DETAILS)}, got {shown(detail)}")
    return _part(where, given.get("url"))


def image_block_part(where: str, block: Mapping[str, Any]) -> ImagePart:
    """Return the image of an image block of Anthropic's. ApiError 400 for a source that is none."""
    given = block.get("source")
    source: Mapping[str, Any] = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if block.get("transformations"):
        _refuse(where, "has transformations, which are not supported")
    if kind == "url":
        return _part(where, source.get("url"))
    if kind != "base64":
        _refuse(where, f"must have a source of the type base64 or url, got {shown(kind)}")
    media_type, data = source.get("media_type"), source.get("data")
    if media_type not in MEDIA_TYPES or not isinstance(data, str):
        expected = f"data of a media_type that is one of {', '.join(MEDIA_TYPES)}"
        _refuse(where, f"must have {expected}, got {shown(media_type)}")
    return ImagePart(where, f"data:{media_type};base64,{data}")


def _part(where: str, url: object) -> ImagePart:
    if not isinstance(url, str):
        _refuse(where, f"must have a URL that is a string, got {shown(url)}")
    return ImagePart(where, url)


def with_image_parts(messages: Sequence[Message], *, reads_images: bool) -> list[Message]:
    """Return the messages of a chat with ImagePart in place of the parts that are images.

    ApiError 400 for one that has none, and for any with a model that reads text alone.
    """
    return [
        _with_image_parts(f"messages[{index}].content", message, reads_images=reads_images)
        for index, message in enumerate(messages)
    ]


def _with_image_parts(where: str, message: Message, *, reads_images: bool) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    parts = list[object]()
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if is_image(part) and not reads_images:
            invalid(part_problem(place, part), param=where)
        parts.append(image_url_part(place, part) if is_image(part) else part)
    return {**message, "content": parts}


def marked(messages: Sequence[Message], marks: ImageMarks) -> tuple[list[Message], list[ImagePart]]:
    """Return messages with parts that have marks in place of their images, and the images by the numbers of marks."""
    images: list[ImagePart] = []

    def mark(part: ImagePart) -> object:
        images.append(part)
        return marks.part(len(images) - 1)

    return with_parts(messages, mark), images


def with_parts(messages: Sequence[Message], change: Callable[[ImagePart], object]) -> list[Message]:
    """Return messages with what `change` returns in place of each image, in their order."""
    taken = list[Message]()
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(part, ImagePart) for part in content):
            parts = [change(part) if isinstance(part, ImagePart) else part for part in content]
            message = {**message, "content": parts}  # noqa: PLW2901
        taken.append(message)
    return taken


def _refuse(where: str, problem: str) -> NoReturn:
    """Raise ApiError 400 for an image."""
    invalid(f"{where} {problem}", param=where)


def _fetcher(options: ServerOptions) -> "ImageFetcher | None":
    """Return the fetcher of a server that lists hosts."""
    if not options.allowed_media_domains:
        return None
    from quire.server.images.fetching import ImageFetcher  # noqa: PLC0415 (aiohttp: 0.1 s)

    return ImageFetcher(options.allowed_media_domains, options.max_image_bytes)


# --- decoding ---------------------------------------------------------------------------------------------------------


class KeptImage(NamedTuple):
    """A decoded image, and its number."""

    decoded: worker.ImageDecoded
    numbered: NumberedImage


async def _off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return what work on so many bytes returns; that of many is done in a thread, without the interpreter lock."""
    return await asyncio.to_thread(work) if num_bytes > DIGEST_BYTES else work()


class ImageDecoder:
    """Decodes the images of requests off the event loop. Lives on one event loop; `close` it there."""

    def __init__(self, settings: ImageSettings, options: ServerOptions) -> None:
        self._options = options
        self._fetcher = _fetcher(options)
        self._fetches = FairSemaphore(MAX_FETCHES)
        self._kept = OrderedDict[bytes, KeptImage]()   # digest of salt and URL -> image, oldest use first
        self._num_kept_bytes = 0
        self._lane = SandboxLane(_IMAGES, "image", lambda: frame(ReadSettings(settings)))

    def warm_up(self) -> None:
        """Start the process before the first image. Takes 1 to 2 ms."""
        self._lane.warm_up()

    async def numbered(
        self, images: Sequence[ImagePart], prompts: ImagePrompts, reserve: Callable[[int, str], None], client_id: str,
        cache_salt: str | None = None,
    ) -> list[NumberedImage]:  # fmt: skip
        """Return the images of a call as the model gets them. ApiError 400 names one that cannot be used.

        `reserve` is called with the bytes that each image holds, and its place in the body. ApiError 503 when closed.
        """
        options, num_decoded = self._options, 0
        if len(images) > options.max_images:
            problem = f"is the last of {len(images)} images, and a request may have {options.max_images} (max_images)"
            _refuse(images[-1].where, problem)
        numbered = []
        for part in images:
            if part.kept is not None:
                reserve(len(part.kept.prepared.pixels), part.where)
                numbered.append(part.kept)
                continue
            left = options.max_decoded_image_bytes // PIXEL_BYTES - num_decoded
            if part.url[:5].lower() == "data:":
                found = await self._known(part, self._data_start(part), left, prompts, client_id, cache_salt)
            else:
                async with self._fetches.slot(client_id):
                    found = await self._new(part, await self._fetched(part), left, prompts, client_id, cache_salt)
            num_decoded += found.decoded.num_pixels
            reserve(len(found.decoded.image.pixels), part.where)
            numbered.append(found.numbered)
        return numbered

    async def close(self) -> None:
        """Kill the process; waiting calls fail with 503. Idempotent."""
        await self._lane.close()

    async def _fetched(self, part: ImagePart) -> bytes:
        """Return the file of an image that a URL names."""
        if self._fetcher is None:
            _refuse(part.where, "must be a data: URL: this server fetches no images (allowed_media_domains)")
        return await self._fetcher.fetch(part.where, part.url)

    def _data_start(self, part: ImagePart) -> int:
        """Return where the base64 text of a data: URL begins, of at most max_image_bytes."""
        head, comma, _ = part.url[:_MAX_HEAD_CHARS].partition(",")
        if not comma or not _HEAD.fullmatch(head):
            _refuse(part.where, f"must be base64 of one of {', '.join(MEDIA_TYPES)}, got {shown(head)}")
        start = len(head) + 1
        num_bytes, most = (len(part.url) - start) * 3 // 4, self._options.max_image_bytes
        if num_bytes > most:
            _refuse(part.where, f"has {num_bytes} bytes, and an image may have {most} (max_image_bytes)")
        return start

    async def _known(
        self, part: ImagePart, start: int, max_pixels: int, prompts: ImagePrompts, client_id: str,
        cache_salt: str | None,
    ) -> KeptImage:  # fmt: skip
        """Return an image, which is kept for the same URL under the same salt. Arguments as in `_new`."""
        url = part.url
        file = await _off_loop(len(url), lambda: salted_digest(cache_salt, url.encode(errors="surrogatepass")))
        found = self._kept.get(file)
        if found is None or found.decoded.num_pixels > max_pixels:
            found = await self._new(part, url[start:], max_pixels, prompts, client_id, cache_salt)
            self._num_kept_bytes += 0 if file in self._kept else len(found.decoded.image.pixels)
        self._kept[file] = found
        self._kept.move_to_end(file)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popitem(last=False)[1].decoded.image.pixels)
        return found

    async def _new(
        self, part: ImagePart, data: bytes | str, max_pixels: int, prompts: ImagePrompts, client_id: str,
        cache_salt: str | None,
    ) -> KeptImage:  # fmt: skip
        """Return an image of a file that is decoded for it. Arguments as in `_decoded`."""
        reply = await self._decoded(part, data, max_pixels, client_id)
        key = await _off_loop(len(reply.image.pixels), partial(image_key, reply.image, cache_salt))
        return KeptImage(reply, prompts.numbered(reply.image, key))

    async def _decoded(
        self, part: ImagePart, data: bytes | str, max_pixels: int, client_id: str
    ) -> worker.ImageDecoded:
        """Return a decoded image of at most max_pixels, what the request's earlier images have left of its limit."""
        most = min(max_pixels, self._options.max_image_pixels)
        try:
            async with self._lane.semaphore.slot(client_id):
                file = data.encode("ascii") if isinstance(data, str) else data
                job = frame(DecodeImage(file, isinstance(data, str), most))
                reply = worker.decode_reply(await self._lane.ask(job))
        except UnicodeEncodeError:
            _refuse(part.where, "must be base64")
        except JobLimitError as error:
            _refuse(part.where, f"cannot be decoded {error}")
        except SandboxEndedError as error:
            if -error.status not in _CRASHES:
                raise
            _refuse(part.where, "cannot be decoded: the decoder has crashed")
        if isinstance(reply, ImageRefused):
            message = reply.message
            if most < self._options.max_image_pixels:
                message = message.replace("max_image_pixels", "max_decoded_image_bytes of a request's images")
            _refuse(part.where, message)
        assert isinstance(reply, worker.ImageDecoded), f"expected an image, got {reply}"
        return reply
