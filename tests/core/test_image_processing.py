"""Images as models get them: equal to transformers' processors without torchvision, and what is refused."""

import json
import random
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.image_processing import (
    ImageSettings,
    PixelLimits,
    as_rgb,
    decoded,
    image_settings,
    pixel_values,
    prepared,
    read_processor,
    settings_of_any_size,
    settings_of_bounded_size,
)
from quire.model.source import read_folder
from support.small_vision import write_gemma3, write_llava

SETTINGS = ImageSettings("llava", 7, 14, "crop", 28, 28, 3, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 28)
MODES = ("RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "PA")
PLENTY = 1 << 25
NO_LIMITS = PixelLimits()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    random_bytes = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode == "P":
        return Image.fromarray(random_bytes[:, :, :3]).quantize(16)
    if mode == "PA":
        return Image.fromarray(random_bytes[:, :, :3]).quantize(16).convert("PA")
    return Image.fromarray(random_bytes).convert(mode)


def file_of(image: Image.Image, form: str = "PNG", **settings: object) -> bytes:
    """Return the bytes of an image file."""
    buffer = BytesIO()
    image.save(buffer, form, **settings)
    return buffer.getvalue()


def folder_with(folder: Path, settings: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(settings))
    return folder


def read(folder: Path, image_size: int, num_extra: int = 0) -> ImageSettings:
    return image_settings(
        *read_processor(folder), "llava", image_token_id=7, image_size=image_size, patch_size=14, num_extra=num_extra
    )


def values(settings: ImageSettings, image: Image.Image) -> np.ndarray:
    return pixel_values(settings, prepared(image, settings))


@pytest.mark.parametrize(
    ("name", "size", "crop"),
    [
        ("clip", {"shortest_edge": 28}, 28), ("clip", {"shortest_edge": 30}, 42),
        ("clip", {"height": 28, "width": 28}, 28), ("llava", {"shortest_edge": 56}, 56),
    ],
)  # fmt: skip
def test_pixels_of_random_sizes_are_those_of_transformers(
    name: str, size: dict[str, int], crop: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    kind = {"clip": "CLIPImageProcessorPil", "llava": "LlavaImageProcessorPil"}[name]
    processor = getattr(transformers, kind)(size=size, crop_size={"height": crop, "width": crop})
    processor.save_pretrained(tmp_path)
    settings = read(tmp_path, crop)
    draws = random.Random(1)
    for number in range(40):
        width, height = draws.randint(1, 90), draws.randint(1, 90)
        mode = MODES[number % 4]
        image = noise(width, height, mode, seed=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
        found = values(settings, as_rgb(image))
        assert found.dtype == expected.dtype == np.float32
        np.testing.assert_array_equal(found, expected, err_msg=f"{width} x {height} of {mode}")
        assert settings.num_tokens(prepared(as_rgb(image), settings).grid) == (crop // 14) ** 2


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_placeholders_of_500_sizes_are_as_many_as_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write = {"llava": write_llava, "gemma3": write_gemma3}[family]
    vision = read_folder(write(tmp_path)).spec.vision
    assert vision is not None
    sizes = {"image_size": vision.image_size, "patch_size": vision.patch_size, "pool": vision.pool}
    own = image_settings(*read_processor(tmp_path), family, image_token_id=7, **sizes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if family == "llava":
        processor = transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil.from_pretrained(tmp_path), tokenizer, patch_size=vision.patch_size,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip
    else:
        images = transformers.Gemma3ImageProcessorPil.from_pretrained(tmp_path)
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=vision.num_tokens)
    draws = random.Random(1)
    drawn = [(draws.randint(1, 400), draws.randint(1, 400)) for _ in range(500)]
    expected = processor._get_num_multimodal_tokens(image_sizes=drawn).num_image_tokens
    found = [own.num_tokens(prepared(Image.new("RGB", (width, height)), own).grid) for height, width in drawn]
    assert found == expected


def test_pixels_of_gemma_3_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor.save_pretrained(tmp_path)
    sizes = {"image_token_id": 7, "image_size": 56, "patch_size": 14, "pool": 2}
    settings = image_settings(*read_processor(tmp_path), "gemma3", **sizes)
    for number, (width, height) in enumerate([(1, 1), (56, 56), (90, 31), (17, 200)]):
        image = noise(width, height, MODES[number % 4], seed=number)
        expected = np.asarray(processor(image, return_tensors="np", do_convert_rgb=True)["pixel_values"][0])
        np.testing.assert_array_equal(values(settings, as_rgb(image)), expected)
    assert settings.num_tokens(prepared(as_rgb(image), settings).grid) == 4
    folder_with(tmp_path, {"do_pan_and_scan": True})
    with pytest.raises(ModelError, match="do_pan_and_scan must be false, got True"):
        image_settings(*read_processor(tmp_path), "gemma3", image_token_id=7, image_size=224, patch_size=14)
    with pytest.raises(ModelError, match="images of a mllama are not read"):
        image_settings(*read_processor(tmp_path), "mllama", image_token_id=7, image_size=224, patch_size=14)


def read_any(folder: Path, limits: PixelLimits = NO_LIMITS, family: str = "qwen2_5_vl") -> ImageSettings:
    return settings_of_any_size(
        *read_processor(folder), family, image_token_id=7, patch_size=14, pool=2, num_frames=2, limits=limits
    )


def test_pixels_of_images_of_any_size_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 20)
    processor.save_pretrained(tmp_path)
    settings = read_any(tmp_path)
    sizes = [(1, 1), (56, 56), (200, 1), (1, 200), (131, 17), (300, 200), (29, 400), (14, 14), (97, 13)]
    for number, (width, height) in enumerate(sizes):
        image = noise(width, height, MODES[number % 4], seed=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = processor(image, return_tensors="np")
        own = prepared(as_rgb(image), settings)
        found = pixel_values(settings, own)
        rows, columns = (edge // 28 for edge in found.shape[1:])
        cut = found.reshape(3, rows, 2, 14, columns, 2, 14).transpose(1, 4, 2, 5, 0, 3, 6)
        patches = np.repeat(cut[:, :, :, :, :, None], 2, axis=5).reshape(-1, 3 * 2 * 14 * 14)
        np.testing.assert_array_equal(patches, expected["pixel_values"], err_msg=f"{width} x {height}")
        assert own.grid == (rows, columns)
        assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]


@pytest.mark.parametrize("limits", [(56 * 56, 12_845_056), (65_536, 28 * 28 * 100), (3136, 3200)])
def test_numbers_of_tokens_of_random_sizes_are_those_of_transformers(limits: tuple[int, int], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=limits[0], max_pixels=limits[1])
    processor.save_pretrained(tmp_path)
    settings, draws, num_refused = read_any(tmp_path), random.Random(2), 0
    for _ in range(500):
        width, height = (int(2 ** draws.uniform(0, 13)) for _ in range(2))
        image = ShapeAlone(width, height)
        try:
            expected = processor.get_number_of_image_patches(height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(InvalidRequestError, match="is too narrow: one edge may be 200 times the other"):
                prepared(image, settings)  # type: ignore[arg-type]
            continue
        assert 4 * settings.num_tokens(prepared(image, settings).grid) == expected, (width, height)  # type: ignore[arg-type]
    assert 0 < num_refused < 200


def read_bounded(folder: Path, patch_size: int = 7) -> ImageSettings:
    return settings_of_bounded_size(
        *read_processor(folder), "pixtral", image_token_id=7, patch_size=patch_size, pool=2
    )


@pytest.mark.parametrize("size", [{"longest_edge": 112}, {"height": 112, "width": 70}])
def test_pixels_of_pixtral_are_those_of_transformers(size: dict[str, int], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.PixtralImageProcessorPil(size=size, patch_size=7).save_pretrained(tmp_path)
    processor = transformers.PixtralImageProcessorPil.from_pretrained(tmp_path)
    settings = read_bounded(tmp_path)
    for number, (width, height) in enumerate([(1, 1), (14, 56), (300, 200), (29, 400), (112, 112), (13, 97), (113, 2)]):
        image = noise(width, height, MODES[number % 4], seed=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = processor(image, return_tensors="np", patch_size=14)     # a square's, as PixtralProcessor's
        own = prepared(as_rgb(image), settings)
        np.testing.assert_array_equal(pixel_values(settings, own), expected["pixel_values"][0], err_msg=f"{image.size}")
        assert expected["image_sizes"].tolist() == [[14 * own.grid[0], 14 * own.grid[1]]]


def test_numbers_of_tokens_of_pixtral_are_those_of_transformers(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    folder_with(tmp_path, {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}})
    settings, draws, num_refused = read_bounded(tmp_path, 14), random.Random(3), 0
    for _ in range(500):
        width, height = (int(2 ** draws.uniform(0, 13)) for _ in range(2))
        shape = np.broadcast_to(np.uint8(0), (3, height, width))
        rows, columns = (edge // 28 for edge in module.get_resize_output_image_size(shape, 1540, 28, "channels_first"))
        image = ShapeAlone(width, height)
        if not rows or not columns:             # where transformers' resize fails
            num_refused += 1
            with pytest.raises(InvalidRequestError, match="is too narrow: scaled to 1540 x 1540 at most"):
                prepared(image, settings)  # type: ignore[arg-type]
            continue
        own = prepared(image, settings)  # type: ignore[arg-type]
        assert (own.grid, settings.num_tokens(own.grid)) == ((rows, columns), rows * (columns + 1)), (width, height)
    assert 0 < num_refused < 100


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"size": {"longest_edge": 5000}}, "size must be an integer from 1 to 4096, got 5000"),
        ({"size": {"shortest_edge": 500}}, "size must be an integer from 1 to 4096, got None"),
        ({"size": {"longest_edge": 4096}}, "gives more than 65536 patches of 7 pixels"),
        ({"patch_size": 16}, "patch_size 16 is not the encoder's of config.json, 7"),
        ({"patch_size": {"height": 7, "width": 14}}, "patch_size .* is not the encoder's of config.json, 7"),
        ({"do_center_crop": True}, "do_center_crop must be false, got True"),
        ({"tiles": 4}, "the settings tiles are not known"),
    ],
)
def test_settings_of_pixtral_that_would_give_other_pixels_are_refused(
    settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder_with(tmp_path, {"patch_size": 7, **settings})
    with pytest.raises(ModelError, match=expected):
        read_bounded(tmp_path)


class ShapeAlone:
    """An image of a size, without pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height, self.size = width, height, (width, height)

    def resize(self, size: tuple[int, int], resample: int) -> "ShapeAlone":
        return ShapeAlone(*size)

    def tobytes(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"crops": 3}, "the settings crops are not known"),
        ({"patch_size": 16}, "patch_size 16 is not the encoder's of config.json, 14"),
        ({"merge_size": 1}, "merge_size 1 is not the encoder's of config.json, 2"),
        ({"max_pixels": 10**9}, "max_pixels must be an integer from 1 to 178956970"),
        ({"max_pixels": 10**8}, "max_pixels must be at most 12845056, 65536 patches"),
        ({"size": {"shortest_edge": 3136}}, "max_pixels must be an integer from 1 to 178956970, got None"),
        ({"min_pixels": 10**7}, "min_pixels 10000000 is above max_pixels 1003520"),
        ({"do_resize": False}, "do_resize must be true, got False"),
        ({"image_std": [1, 1, 1e-300]}, r"image_std must be a number from 1e-06 to 1e\+06, got 1e-300"),
        ({"rescale_factor": 10**400}, r"rescale_factor must be a number from .* got an integer of 1329 bits"),
    ],
)
def test_settings_of_any_size_that_would_give_other_pixels_are_refused(
    settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder_with(tmp_path, settings)
    with pytest.raises(ModelError, match=expected):
        read_any(tmp_path)


def test_limits_of_an_operator_are_in_place_of_those_of_files(tmp_path: Path) -> None:
    folder_with(tmp_path, {"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}, "image_mean": [0.5] * 3})
    found = read_any(tmp_path, PixelLimits(most=28 * 28 * 6), "qwen3_vl")
    assert (found.min_pixels, found.max_pixels, found.least_tokens) == (3136, 28 * 28 * 6, 4)
    assert prepared(Image.new("RGB", (640, 480)), found).grid == (2, 2)
    with pytest.raises(ConfigError, match="mm_processor_kwargs: min_pixels 3136 is above max_pixels 100"):
        read_any(tmp_path, PixelLimits(most=100))
    narrow = read_any(tmp_path, PixelLimits(784, 784))
    assert prepared(Image.new("RGB", (2000, 10)), narrow).grid == (1, 15)     # more than max_pixels, as there


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(1, 1), (31, 2), (5, 64)])
def test_every_mode_is_as_transformers_converts_it(mode: str, size: tuple[int, int]) -> None:
    transforms = pytest.importorskip("transformers.image_transforms")
    image = noise(*size, mode)
    expected = transforms.convert_to_rgb(image, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(as_rgb(image)), expected)


def test_grey_of_16_bits_keeps_its_high_bytes_and_its_transparent_value() -> None:
    """transformers converts it by Pillow alone, which clips: values from 255 on are white."""
    grey = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    expected = np.repeat(grey >> 8, 3).reshape(256, 256, 3)
    found = decoded(file_of(Image.fromarray(grey)), PLENTY)
    np.testing.assert_array_equal(np.asarray(found), expected)
    expected[grey == 4369] = 255
    found = decoded(file_of(Image.fromarray(grey), transparency=4369), PLENTY)
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_file_is_upright_on_white_and_its_first_frame() -> None:
    picture = Image.new("RGB", (4, 2), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6    # orientation: turned by a quarter
    assert decoded(file_of(picture, "JPEG", exif=exif), PLENTY).size == (2, 4)
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert decoded(file_of(clear), PLENTY).getpixel((0, 0)) == (255, 255, 255)
    frames = [Image.new("RGB", (3, 3), color) for color in ((0, 255, 0), (0, 0, 255))]
    animated = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded(animated, PLENTY).getpixel((1, 1)) == (0, 255, 0)
    assert decoded(file_of(picture, "WEBP", lossless=True), PLENTY).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_file_is_refused(form: str) -> None:
    whole = file_of(noise(64, 64), form)
    for part in (len(whole) // 2, 40):
        with pytest.raises(InvalidRequestError, match=r"^(cannot be decoded|is no image in one of the formats)"):
            decoded(whole[:part], PLENTY)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", file_of(noise(8, 8), "BMP"),
             file_of(noise(8, 8), "TIFF"), b"\x89PNG\r\n\x1a\n" + b"\0" * 64]
)  # fmt: skip
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"is no image in one of the formats|cannot be"):
        decoded(data, PLENTY)


def test_a_header_past_the_limit_is_refused_before_pixels_are_decoded() -> None:
    for edge, expected in ((6_000, "6000 x 6000 pixels, and at most 33554432 are decoded"), (60_000, "far more than")):
        huge = bytearray(file_of(Image.new("1", (64, 64))))
        huge[16:24] = edge.to_bytes(4, "big") * 2       # the size in the header of a PNG
        huge[29:33] = crc32(huge[12:29]).to_bytes(4, "big")
        with pytest.raises(InvalidRequestError, match=expected):
            decoded(bytes(huge), PLENTY)


def test_a_strip_that_would_be_scaled_to_gigabytes_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1 x 60000 pixels and is too narrow"):
        prepared(Image.new("RGB", (1, 60_000)), SETTINGS)


def test_settings_within_the_processors_file(tmp_path: Path) -> None:
    own = {"size": {"shortest_edge": 28}, "crop_size": 28, "image_processor_type": "CLIPImageProcessor"}
    folder_with(tmp_path, {"image_processor": own, "patch_size": 14}, "processor_config.json")
    found = read(tmp_path, 28, num_extra=1)
    assert (found.image_token_id, found.shortest_edge, found.num_tokens((2, 2))) == (7, 28, 5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"crops": 3}, "the settings crops are not known"),
        ({"do_normalize": False}, "do_normalize must be true, got False"),
        ({"do_pad": True}, "do_pad must be false, got True"),
        ({"image_mean": [0.5]}, "image_mean must be a list of three numbers"),
        ({"image_mean": [0.5, 10**400, 0.5]}, r"image_mean must be a number from -1e\+06 to 1e\+06, got an integer of"),
        ({"image_std": [0.5, 0.5, 0]}, r"image_std must be a number from 1e-06 to 1e\+06, got 0"),
        ({"image_std": [0.5, float("nan"), 0.5]}, "image_std must be a number from 1e-06 .* got nan"),
        ({"rescale_factor": float("inf")}, "rescale_factor must be a number from .* got inf"),
        ({"resample": 9}, "resample must be an integer from 0 to 5, got 9"),
        ({"size": {"shortest_edge": 10**9}}, "shortest_edge must be an integer from 0 to 4096"),
        ({"crop_size": {"height": 42, "width": 42}}, "images of 42 x 42 pixels, and the encoder .* reads 28 x 28"),
        ({"do_center_crop": False}, "size must be a height and a width where do_center_crop is false"),
        ({"size": "large"}, "size and crop_size must be numbers or objects"),
    ],
)
def test_settings_that_would_give_other_pixels_are_refused(
    settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    base = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    folder_with(tmp_path, base | settings)
    with pytest.raises(ModelError, match=expected):
        read(tmp_path, 28)


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json or processor_config\.json"):
        read(tmp_path, 28)
