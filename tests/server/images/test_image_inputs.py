"""Images of requests: parts of the three APIs, decoding in a process with limits, and what is refused."""

import asyncio
import os
import signal
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.core.image_processing import ImageSettings, prepared
from quire.engine.requests.image_prompts import ImagePrompts, NumberedImage
from quire.server.errors import ApiError
from quire.server.images import image_inputs
from quire.server.images.image_inputs import (
    ImageDecoder,
    ImagePart,
    image_block_part,
    image_url_part,
    marked,
    with_image_parts,
)
from quire.server.limits import sandbox
from quire.server.limits.memory import ImageMemory
from quire.server.options import ServerOptions
from quire.text.image_marks import ImageMarks
from quire.text.tokenizer import Tokenizer
from support.server import is_stopped, wait_until
from support.small_tokenizers import byte_level, save

HALF = (0.5, 0.5, 0.5)
WHERE = "messages[2].content[1]"
BASE = "data:image/png;base64,"


def png(width: int = 12, height: int = 8, seed: int = 0, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


@pytest.fixture
def prompts(tmp_path: Path) -> ImagePrompts:
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path))
    token_id = tokenizer.token_id("<pad>")
    assert token_id is not None
    return ImagePrompts(ImageSettings("llava", token_id, 4, "fixed", 8, 8, 3, 1 / 255, HALF, HALF), tokenizer)


@asynccontextmanager
async def opened(
    prompts: ImagePrompts, **options: Any  # noqa: ANN401 (of any type)
) -> AsyncIterator[ImageDecoder]:
    decoder = ImageDecoder(prompts.settings, ServerOptions(**options))
    try:
        yield decoder
    finally:
        await decoder.close()


def reserve_nothing(num_bytes: int, where: str) -> None:
    assert num_bytes == 8 * 8 * 3
    assert where.startswith("messages")


async def load(decoder: ImageDecoder, prompts: ImagePrompts, *urls: str) -> Sequence[NumberedImage]:
    parts = [ImagePart(f"messages[2].content[{number}]", each) for number, each in enumerate(urls, 1)]
    return await decoder.numbered(parts, prompts, reserve_nothing, "client")


async def refusal(loading: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await loading
    return caught.value


def test_images_are_those_of_the_processor_in_this_process(prompts: ImagePrompts) -> None:
    async def check() -> None:
        async with opened(prompts) as decoder:
            files = [png(), png(7, 90, form="JPEG"), png(form="GIF"), png(form="WEBP"), png()]
            images = await load(decoder, prompts, *map(url, files))
            for image, data in zip(images, files, strict=True):
                with Image.open(BytesIO(data)) as opened_image:
                    assert image.prepared == prepared(opened_image.convert("RGB"), prompts.settings)
            assert [image.serial for image in images] == [0, 1, 0, 2, 0], "a GIF has the pixels of the PNG"

    asyncio.run(check())


HOSTILE = {
    "no image": (url(b"hello"), "is no image in one of the formats PNG, JPEG, WEBP, GIF"),
    "svg": (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "must be base64 of one of image/png"),
    "svg as png": (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "is no image in one of the formats"),
    "truncated": (url(png(64, 64)[:900]), "cannot be decoded"),
    "empty": (BASE, "is no image"),
    "blanks": (BASE + b64encode(png()).decode()[:40] + "\n" + b64encode(png()).decode()[40:], "is no base64 without"),
    "no base64": (BASE + "*" * 40, "is no base64 without blanks"),
    "half a surrogate": (BASE + "\ud800", "must be base64"),
    "text": ("data:text/plain;base64,aGk=", "must be base64 of one of"),
    "not base64": ("data:image/png,aGk=", "must be base64 of one of"),
    "a long head": ("data:image/png;" + "a=b;" * 100 + "base64,aGk=", "must be base64 of one of"),
    "http": ("http://example.org/a.png", "must be a data: URL: this server fetches no images (allowed_media_domains)"),
    "file": ("file:///etc/passwd", "must be a data: URL"),
    "nothing": ("", "must be a data: URL"),
}


def test_hostile_images_cost_their_requests_alone(prompts: ImagePrompts) -> None:
    async def check() -> None:
        async with opened(prompts, max_image_pixels=5000) as decoder:
            for name, (hostile, expected) in HOSTILE.items():
                error = await refusal(load(decoder, prompts, url(png()), hostile))
                assert (error.status, error.param) == (400, "messages[2].content[2]"), name
                assert error.message.startswith("messages[2].content[2] "), name
                assert expected in error.message, (name, error.message)
            error = await refusal(load(decoder, prompts, url(png(100, 100))))
            assert "has 100 x 100 pixels, and at most 5000 are decoded (max_image_pixels)" in error.message
            assert len(await load(decoder, prompts, url(png()))) == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("limits", "num_images", "expected"),
    [
        ({}, 200, "is the last of 200 images, and a request may have 8 (max_images)"),
        ({"max_image_bytes": 200}, 1, "bytes, and an image may have 200 (max_image_bytes)"),
        ({"max_decoded_image_bytes": 1000}, 3, "at most 58 are decoded (max_decoded_image_bytes"),
    ],
)
def test_images_of_a_request_are_bounded(
    limits: dict[str, Any], num_images: int, expected: str, prompts: ImagePrompts
) -> None:
    async def check() -> None:
        async with opened(prompts, **limits) as decoder:
            error = await refusal(load(decoder, prompts, *[url(png())] * num_images))
            assert error.status == 400
            assert expected in error.message, error.message

    asyncio.run(check())


def test_a_file_is_decoded_once_under_a_salt(prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 8 * 8 * 3
    monkeypatch.setattr(image_inputs, "MAX_KEPT_BYTES", 2 * num_bytes)

    async def check() -> None:
        async with opened(prompts) as decoder:
            first = await load(decoder, prompts, url(png()), url(png(seed=9)))
            assert (decoder._num_kept_bytes, len(decoder._kept)) == (2 * num_bytes, 2)
            await load(decoder, prompts, url(png()), url(png(seed=8)))      # the least recently used one is dropped
            assert (decoder._num_kept_bytes, len(decoder._kept)) == (2 * num_bytes, 2)
            await decoder.close()                                           # from here on none can be decoded
            again = await load(decoder, prompts, url(png()))
            assert (again[0].serial, again[0].prepared) == (first[0].serial, first[0].prepared)
            assert (await refusal(load(decoder, prompts, url(png(seed=9))))).status == 503
            part = ImagePart("messages[2].content[1]", url(png()))
            assert (await refusal(decoder.numbered([part], prompts, reserve_nothing, "client", "salt"))).status == 503

    asyncio.run(check())


def test_pixels_of_a_kept_image_are_hashed_once(prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with opened(prompts) as decoder:
            one, other = await load(decoder, prompts, url(png()), url(png(seed=9)))
            monkeypatch.setattr(image_inputs, "image_key", None)
            again = await load(decoder, prompts, url(png(seed=9)), url(png()))
            assert [each.serial for each in again] == [other.serial, one.serial] == [1, 0]

    asyncio.run(check())


def test_digests_of_large_files_and_images_are_taken_off_the_loop(
    prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[bool]()
    real = image_inputs.salted_digest, image_inputs.image_key

    def noted(work: Callable[..., bytes]) -> Callable[..., bytes]:
        def call(*given: Any) -> bytes:  # noqa: ANN401
            threads.append(threading.current_thread() is threading.main_thread())
            return work(*given)

        return call

    for name, work in zip(("salted_digest", "image_key"), real, strict=True):
        monkeypatch.setattr(image_inputs, name, noted(work))

    async def check() -> None:
        async with opened(prompts) as decoder:
            await load(decoder, prompts, url(png()))
            assert threads == [True, True]
            monkeypatch.setattr(image_inputs, "DIGEST_BYTES", 8 * 8 * 3 - 1)
            await load(decoder, prompts, url(png(seed=9)))
            assert threads == [True, True, False, False]

    asyncio.run(check())


def test_a_kept_image_counts_as_one_that_is_decoded(prompts: ImagePrompts) -> None:
    async def check() -> None:
        async with opened(prompts, max_decoded_image_bytes=2 * 4 * 40 * 33) as decoder:
            image = url(png(40, 33))
            await load(decoder, prompts, image, image)
            error = await refusal(load(decoder, prompts, image, image, image))
            assert "max_decoded_image_bytes of a request's images" in error.message

    asyncio.run(check())


# A process that stops itself when it decodes one image, which it has read by then.
STOPS_AT_AN_IMAGE = """
import binascii, os, signal

decode = binascii.a2b_base64

def decode_or_stop(data, **settings):
    if data == {data!r}:
        os.kill(os.getpid(), signal.SIGSTOP)
    return decode(data, **settings)

binascii.a2b_base64 = decode_or_stop
"""


def test_a_decoder_that_dies_is_replaced(
    prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A crash of the decoder is the image's fault; a process that the system kills is not."""
    held = url(png(seed=99))
    (tmp_path / "sitecustomize.py").write_text(STOPS_AT_AN_IMAGE.format(data=held.removeprefix(BASE).encode()))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sandbox, "REPLY_SLACK", 60)

    async def check() -> None:
        async with opened(prompts) as decoder:
            await load(decoder, prompts, url(png()))
            for number, is_fault in ((signal.SIGSEGV, True), (signal.SIGKILL, False)):
                process = decoder._lane.process
                assert process is not None
                loading = asyncio.create_task(load(decoder, prompts, held))
                await asyncio.to_thread(wait_until, lambda pid=process._process.pid: is_stopped(pid))
                os.kill(process._process.pid, number)
                os.kill(process._process.pid, signal.SIGCONT)
                if is_fault:
                    assert "the decoder has crashed" in (await refusal(loading)).message
                else:
                    with pytest.raises(RuntimeError, match="killed by signal 9"):
                        await loading
                assert len(await load(decoder, prompts, url(png(seed=number)))) == 1

    asyncio.run(check())


def test_a_missing_pillow_is_told_with_the_command_that_helps(
    prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError(\"No module named 'PIL'\", name='PIL')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def check() -> None:
        async with opened(prompts) as decoder:
            error = await refusal(load(decoder, prompts, url(png())))
            assert error.status == 400
            assert "images needs the package PIL: pip install 'quire[images]'" in error.message

    asyncio.run(check())


def test_memory_of_images_is_bounded_by_client_and_in_all() -> None:
    memory = ImageMemory(1000)
    memory.reserve("a", 0, 400, WHERE)
    with pytest.raises(ApiError, match="hold 400 of 1000 bytes") as caught:
        memory.reserve("a", 0, 101, WHERE)
    assert caught.value.status == 429
    memory.reserve("b", 0, 450, WHERE)
    with pytest.raises(ApiError, match="hold 850 of 1000 bytes"):
        memory.reserve("c", 0, 151, WHERE)
    with pytest.raises(ApiError, match="come to 501 bytes, and may have 500") as caught:
        memory.reserve("c", 400, 101, WHERE)
    assert caught.value.status == 400
    memory.release("a", 400)
    memory.release("b", 450)
    assert not memory.num_client_bytes


# --- parts of bodies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (image_url_part, {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}),
        (image_url_part, {"type": "image_url", "image_url": "data:x"}),
        (image_url_part, {"type": "input_image", "image_url": "data:x", "detail": "original", "file_id": None}),
        (image_block_part, {"type": "image", "source": {"type": "url", "url": "data:x"}, "transformations": {}}),
    ],
)
def test_parts_of_all_apis(make: Callable[[str, Any], ImagePart], part: dict[str, Any]) -> None:
    assert make(WHERE, part) == ImagePart(WHERE, "data:x")


def test_a_block_with_base64_is_a_data_url() -> None:
    source = {"type": "base64", "media_type": "image/jpeg", "data": "aGk="}
    assert image_block_part(WHERE, {"source": source}).url == "data:image/jpeg;base64,aGk="


@pytest.mark.parametrize(
    ("make", "part", "expected"),
    [
        (image_url_part, {"image_url": {"url": 5}}, "must have a URL that is a string, got 5"),
        (image_url_part, {}, "must have a URL that is a string, got None"),
        (image_url_part, {"image_url": {"url": "data:x", "detail": "huge"}}, "must have a detail that is one of auto"),
        (image_url_part, {"image_url": {"url": "data:x", "size": 1}}, "has unknown fields: 'size'"),
        (image_url_part, {"file_id": "file-1"}, "has a file_id, but this server stores no files"),
        (image_url_part, {"image_url": {"url": "data:x"}, "uuid": "a"}, "has a uuid, but this server stores no files"),
        (image_block_part, {}, "must have a source of the type base64 or url, got None"),
        (image_block_part, {"source": {"type": "file", "file_id": "a"}}, "the type base64 or url, got 'file'"),
        (image_block_part, {"source": {"type": "base64", "media_type": "image/svg+xml", "data": ""}}, "image/svg"),
        (image_block_part, {"source": {"type": "base64", "media_type": "image/png"}}, "must have data of a media_type"),
        (image_block_part, {"source": {"type": "url", "url": "data:x"}, "transformations": {"a": 1}}, "not supported"),
    ],
)  # fmt: skip
def test_parts_that_are_no_images_are_named(
    make: Callable[[str, Any], ImagePart], part: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ApiError) as caught:
        make(WHERE, part)
    assert (caught.value.status, caught.value.param) == (400, WHERE)
    assert expected in caught.value.message


def test_messages_have_marks_in_place_of_images() -> None:
    marks = ImageMarks("<image>", "\ue000secret:")
    part = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages = [
        {"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
        {"role": "tool", "content": [part]},
    ]  # fmt: skip
    taken, images = marked(with_image_parts(messages, reads_images=True), marks)
    assert [image.where for image in images] == ["messages[1].content[1]", "messages[2].content[0]"]
    assert taken[0] is messages[0]
    assert taken[1]["content"] == [{"type": "text", "text": "a"}, marks.part(0)]
    assert taken[2]["content"] == [marks.part(1)]
    assert messages[1]["content"][1] is part, "a body is not changed"
    with pytest.raises(ApiError, match=r"^messages\[1\]\.content\[1\]: images, audio and files are not served"):
        with_image_parts(messages, reads_images=False)
