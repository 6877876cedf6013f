"""Placeholders of images in tokens, and the numbers of images."""

import json
from array import array
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.core.errors import InvalidRequestError, ModelError
from quire.core.image_processing import ImageSettings, PreparedImage, prepared
from quire.core.token_ids import pack_tokens
from quire.engine.requests import image_prompts
from quire.engine.requests.image_prompts import ImagePrompts, NumberedImage, image_key
from quire.text.tokenizer import Tokenizer
from support.small_tokenizers import byte_fallback, byte_level, save

PLACEHOLDER = "<image>"
BACKENDS = {"bytes": byte_level, "low lines": byte_fallback}


def tokenizer_of(backend: Backend, folder: Path, placeholder: str = PLACEHOLDER) -> Tokenizer:
    backend.add_special_tokens([AddedToken(placeholder, special=True, normalized=False)])
    return Tokenizer.from_folder(save(backend, folder))


def settings_of(tokenizer: Tokenizer) -> ImageSettings:
    token_id = tokenizer.token_id(PLACEHOLDER)
    assert token_id is not None
    half = (0.5, 0.5, 0.5)
    return ImageSettings("llava", token_id, 2, "fixed", 4, 6, 3, 1 / 255, half, half)


@pytest.fixture(params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return tokenizer_of(BACKENDS[request.param](), tmp_path)


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> ImagePrompts:
    return ImagePrompts(settings_of(tokenizer), tokenizer)


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 9, 3), dtype=np.uint8))


def numbered(prompts: ImagePrompts, *seeds: int) -> list[NumberedImage]:
    found = [prepared(picture(seed), prompts.settings) for seed in seeds]
    return [prompts.numbered(each, image_key(each)) for each in found]


def placed(
    tokenizer: Tokenizer, prompts: ImagePrompts, text: str, images: list[NumberedImage]
) -> tuple[list[int], tuple[Any, ...]]:
    token_ids, spans = prompts.placed(text, pack_tokens(tokenizer.encode(prompts.written(text))), images)
    return list(token_ids), spans


def test_an_image_is_a_run_of_placeholders(tokenizer: Tokenizer, prompts: ImagePrompts) -> None:
    """As transformers writes the placeholder so often into the text before it is tokenized."""
    images = numbered(prompts, 1, 2)
    text = f"stop {prompts.marks.mark(1)}the {prompts.marks.mark(0)}end"
    token_ids, spans = placed(tokenizer, prompts, text, images)
    assert token_ids == tokenizer.encode(f"stop {PLACEHOLDER * 6}the {PLACEHOLDER * 6}end")
    assert [(span.serial, span.num_tokens, span.prepared) for span in spans] == [
        (1, 6, images[1].prepared), (0, 6, images[0].prepared),
    ]  # fmt: skip
    for span in spans:
        assert set(token_ids[span.start : span.start + 6]) == {prompts.settings.image_token_id}
        assert token_ids[span.start - 1] != prompts.settings.image_token_id


def test_a_typed_placeholder_is_tokens_of_its_characters(tokenizer: Tokenizer, prompts: ImagePrompts) -> None:
    images = numbered(prompts, 1)
    text = f"a {PLACEHOLDER} {prompts.marks.mark(0)}{PLACEHOLDER}"
    token_ids, spans = placed(tokenizer, prompts, text, images)
    assert token_ids.count(prompts.settings.image_token_id) == 6
    (span,) = spans
    begin, end = token_ids[: span.start], token_ids[span.start + 6 :]
    assert tokenizer.decode(begin).split() == ["a", PLACEHOLDER]
    assert tokenizer.decode(end) == PLACEHOLDER
    alone, none = placed(tokenizer, prompts, f"a {PLACEHOLDER}", [])
    assert prompts.settings.image_token_id not in alone
    assert none == ()


@pytest.mark.parametrize("marks", [(), (0, 0), (0, 1, 2)])
def test_a_text_without_each_image_once_is_refused(marks: tuple[int, ...], prompts: ImagePrompts) -> None:
    text = "a" + "".join(map(prompts.marks.mark, marks))
    with pytest.raises(InvalidRequestError, match=f"writes {len(marks)} of 2 images, or one of them twice"):
        prompts.placed(text, array("i", [1]), numbered(prompts, 1, 2))


def test_tokens_without_the_placeholders_of_the_text_are_refused(prompts: ImagePrompts) -> None:
    token_id, images = prompts.settings.image_token_id, numbered(prompts, 1)
    for token_ids in ([1], [token_id, token_id]):
        with pytest.raises(InvalidRequestError, match="do not have <image> where its text has"):
            prompts.placed(prompts.marks.mark(0), array("i", token_ids), images)


def test_equal_pixels_have_one_number_and_no_number_is_given_twice(
    prompts: ImagePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_prompts, "MAX_KNOWN_IMAGES", 2)
    serials = [image.serial for image in numbered(prompts, 1, 2, 1, 3, 2, 1)]
    assert serials == [0, 1, 0, 2, 3, 4], "the third image has replaced the second, and the second's return the first"
    once = prepared(picture(1), prompts.settings)
    assert [prompts.numbered(once, image_key(once, salt)).serial for salt in ("a", "b", "a")] == [5, 6, 5]
    turned = PreparedImage(6, 4, (3, 2), prepared(picture(1), prompts.settings).pixels)
    assert prompts.numbered(turned, image_key(turned)).serial == 7, "the same bytes of another shape"


def test_images_of_a_caller_in_this_process(prompts: ImagePrompts, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    picture(1).save(file)
    data = b64encode(file.read_bytes()).decode()
    content = [
        {"type": "image", "image": picture(1)}, {"type": "image", "image": file}, {"type": "image", "image": str(file)},
        {"type": "image_pil", "image_pil": picture(1)}, {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]  # fmt: skip
    messages, images = prompts.taken([{"role": "user", "content": content}, {"role": "user", "content": "hi"}])
    assert [image.serial for image in images] == [0] * 5
    assert [part["type"] for part in messages[0]["content"]] == ["image"] * 4 + ["text", "image"]
    assert messages[0]["content"][5] == prompts.marks.part(4)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": "/no/such/file.png"}, "No such file"),
        ({"type": "image", "image": 5}, "must have an image of Pillow or the path of a file, got 5"),
        ({"type": "image"}, "must have an image of Pillow"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "must have a data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA A="}}, "base64|Only base64|padding"),
    ],
)
def test_what_is_no_image_is_named(part: dict[str, Any], expected: str, prompts: ImagePrompts) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^messages\[0\]\.content\[0\] .*({expected})"):
        prompts.taken([{"role": "user", "content": [part]}])


def test_a_tokenizer_without_the_placeholder_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level(), tmp_path)
    half = (0.5, 0.5, 0.5)
    with pytest.raises(ModelError, match=r"image_token_id 5000 of config\.json is no special token"):
        ImagePrompts(ImageSettings("llava", 5000, 2, "fixed", 4, 6, 3, 1 / 255, half, half), tokenizer)


def test_gemma_3_has_tokens_around_an_image(tmp_path: Path) -> None:
    """Its template writes the token in front of an image, and the image has tokens of its own."""
    backend = byte_level()
    begin, soft, end = special = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    folder = save(backend, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"boi_token": begin, "eoi_token": end}))
    tokenizer = Tokenizer.from_folder(folder)
    token_id, half = tokenizer.token_id(soft), (0.5, 0.5, 0.5)
    assert token_id is not None
    prompts = ImagePrompts(ImageSettings("gemma3", token_id, 2, "fixed", 4, 4, 2, 1 / 255, half, half), tokenizer)
    assert prompts.marks.placeholder == begin
    text = f"user\n{begin} {prompts.marks.mark(0)}{soft}\n{prompts.marks.mark(1)}"
    token_ids, spans = placed(tokenizer, prompts, text, numbered(prompts, 1, 2))
    typed_begin, typed_soft = (prompts._typed_tokens[each].tolist() for each in (begin, soft))
    image = f"\n\n{begin}{soft * 4}{end}\n\n"
    parts = ["user\n", None, f" {image}", None, f"\n{image}"]
    first, second = tokenizer.encode(f"user\n{begin}")[:-1], tokenizer.encode(f"{begin} {image}{soft}\n{image}")
    at = len(second) - 1 - second[::-1].index(token_id)     # the last placeholder of the second image
    typed_at = next(place for place in range(at - 4, 0, -1) if second[place] == token_id)
    expected = [*first, *typed_begin, *second[1:typed_at], *typed_soft, *second[typed_at + 1 :]]
    assert token_ids == expected, parts
    assert [token_ids[span.start : span.start + 4] for span in spans] == [[token_id] * 4] * 2
    assert token_ids.count(token_id) == 8
