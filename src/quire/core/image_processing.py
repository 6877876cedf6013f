"""Processing of images as a model's files say: decoding, resizing, and the input of its encoder.

A decoded image is resized by Pillow to the size that the model reads, as transformers' `*ImageProcessorPil` classes do.
The rest, rescaling and normalization, depends on the 8 bits of a value alone and is a table (`pixel_values`), so that
the process that decodes images sends 8 bits a value and does without NumPy.
"""

from collections.abc import Mapping
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError, ModelError
from quire.core.model_files import read_json_object
from quire.core.optional_package import needs_library

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.core.arrays import Array  # loads NumPy: the process that decodes images does without

Resize = Literal["crop", "fixed"]
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MAX_EDGE = 4096             # longest edge behind the resize, in pixels; models have 224 to 1,540
MAX_RESIZED_PIXELS = 1 << 25  # between the resize and the crop, where a strip would need gigabytes
PILLOWS_PIXELS = 178_956_970  # past these Pillow refuses to open a file
MAX_IMAGE_PIXELS = 1 << 25  # as a file's header says; larger images are not decoded


class PreparedImage(msgspec.Struct, array_like=True, frozen=True):
    """An image as a model gets it: 8-bit RGB pixels, [height, width, 3], and the grid of the tower's outputs."""

    height: int
    width: int
    grid: tuple[int, int]
    pixels: bytes


class ImageSettings(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a model's image processor, and the tokens of an image in a prompt.

    `resize`: "crop" scales the shorter edge to `shortest_edge` and cuts height x width from the center; "fixed" scales
    to height x width. `resample`: Pillow's number of a filter. `pool`: patches of a row that one token stands for.
    `num_extra`: tokens of an image beside its patches.
    """

    family: str
    image_token_id: int
    patch_size: int
    resize: Resize
    height: int
    width: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    shortest_edge: int = 0
    pool: int = 1
    num_extra: int = 0

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of placeholders of an image with a grid."""
        return grid[0] * grid[1] + self.num_extra


# --- settings ---------------------------------------------------------------------------------------------------------

_CLIP = {
    "do_center_crop": True, "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711),
}  # fmt: skip
_GEMMA3 = {
    "do_center_crop": False, "size": {"height": 224, "width": 224}, "resample": 2,
    "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"llava": _CLIP, "gemma3": _GEMMA3}    # transformers'
_READ = frozenset((
    "do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb", "do_pad", "do_pan_and_scan", "size",
    "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "default_to_square",
))  # fmt: skip
# Keys that change no pixels, or that repeat what a class does.
_IGNORED = frozenset((
    "image_processor_type", "processor_class", "feature_extractor_type", "data_format", "input_data_format",
    "return_tensors", "device", "disable_grouping", "image_seq_length", "pad_size", "_valid_processor_keys",
    "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate",
))  # fmt: skip


def image_settings(
    where: str, processor: Mapping[str, Any], family: str, *, image_token_id: int, image_size: int, patch_size: int,
    pool: int = 1, num_extra: int = 0,
) -> ImageSettings:  # fmt: skip
    """Return the settings of a processor, by the keys of its file `where`, for an encoder of square images.

    ModelError names a setting that is unknown and may change pixels.
    """
    if family not in _DEFAULTS:
        raise ModelError(f"{where}: images of a {family} are not read")
    given = {**_DEFAULTS[family], **{key: value for key, value in processor.items() if value is not None}}
    target, shortest = _size(where, given)
    settings = ImageSettings(
        family=family,
        image_token_id=image_token_id,
        patch_size=patch_size,
        resize="crop" if shortest else "fixed",
        height=_integer(where, "height", target.get("height"), 1, MAX_EDGE),
        width=_integer(where, "width", target.get("width"), 1, MAX_EDGE),
        resample=_integer(where, "resample", given["resample"], 0, 5),
        scale=_number(where, "rescale_factor", given.get("rescale_factor", 1 / 255)),
        mean=_numbers(where, "image_mean", given["image_mean"]),
        std=_numbers(where, "image_std", given["image_std"]),
        shortest_edge=_integer(where, "shortest_edge", shortest, 0, MAX_EDGE),
        pool=pool,
        num_extra=num_extra,
    )
    if (settings.height, settings.width) != (image_size, image_size):
        raise ModelError(
            f"{where} gives images of {settings.height} x {settings.width} pixels, and the encoder of config.json "
            f"reads {image_size} x {image_size}"
        )
    return settings


def read_processor(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the file of a model folder with the settings of its image processor, and them. ModelError for none."""
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            values, where = read_json_object(folder, name), f"{folder}/{name}"
            own = values.get("image_processor")
            if name != PROCESSOR_FILES[0]:
                return where, values
            if isinstance(own, dict):
                return where, own
    raise ModelError(f"{folder}: no {' or '.join(reversed(PROCESSOR_FILES))} with the settings of images")


def _size(where: str, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], object]:
    """Return the size of images behind the resize, and the shorter edge that they are scaled to; 0: to that size."""
    unknown = sorted(given.keys() - _READ - _IGNORED)
    if unknown:
        raise ModelError(f"{where}: the settings {', '.join(unknown)} are not known, and may change pixels")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(name, True) is not True:
            raise ModelError(f"{where}: {name} must be true, got {shown(given[name])}")
    for name in ("do_pad", "do_pan_and_scan"):
        if given.get(name):
            raise ModelError(f"{where}: {name} must be false, got {shown(given[name])}")
    crops, size, crop = given["do_center_crop"], given["size"], given.get("crop_size")
    if isinstance(size, int):
        size = {"shortest_edge": size} if crops else {"height": size, "width": size}
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    target = crop if crops else size
    if not isinstance(size, dict) or not isinstance(target, dict):
        raise ModelError(f"{where}: size and crop_size must be numbers or objects")
    shortest = size.get("shortest_edge") or 0
    if not crops and shortest:
        raise ModelError(f"{where}: size must be a height and a width where do_center_crop is false")
    if crops and not shortest and any(size.get(edge) != target.get(edge) for edge in ("height", "width")):
        raise ModelError(f"{where}: size must have a shortest_edge, or be crop_size, got {size}")
    return target, shortest


def _integer(where: str, name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{where}: {name} must be an integer from {low} to {high}, got {shown(value)}")
    return value


def _number(where: str, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{where}: {name} must be a number, got {shown(value)}")
    return float(value)


def _numbers(where: str, name: str, values: object) -> tuple[float, float, float]:
    if not isinstance(values, list | tuple) or len(values) != 3:
        raise ModelError(f"{where}: {name} must be a list of three numbers, got {shown(values)}")
    red, green, blue = (_number(where, name, value) for value in values)
    return red, green, blue


# --- pixels -----------------------------------------------------------------------------------------------------------


FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decoded(data: bytes, max_pixels: int) -> "Image":
    """Return the first frame of an image file as RGB, upright, and transparent parts on white.

    InvalidRequestError for a file of another format, one with more pixels than `max_pixels`, and one that cannot be
    decoded; NotInstalledError without Pillow. Its text continues the name of the image.
    """
    with needs_library("images", "PIL", "'quire[images]'"):
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (an extra)

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image.width, image.height, max_pixels)
            return as_rgb(image)
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"has far more than {max_pixels} pixels (max_image_pixels)") from None
    except UnidentifiedImageError:
        raise InvalidRequestError(f"is no image in one of the formats {', '.join(FORMATS)}") from None
    except (InvalidRequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise errors of many types
        raise InvalidRequestError(f"cannot be decoded: {shown(str(error) or type(error).__name__)}") from error


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"has {width} x {height} pixels, and at most {max_pixels} are decoded (max_image_pixels)"
        )


def as_rgb(image: "Image") -> "Image":
    """Return an image of Pillow as RGB, upright by its EXIF orientation, and transparent parts on white."""
    from PIL import Image, ImageOps  # noqa: PLC0415 (an extra)

    image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


class _Size(NamedTuple):
    height: int
    width: int


def prepared(image: "Image", settings: ImageSettings) -> PreparedImage:
    """Return an RGB image of Pillow as the model gets it. InvalidRequestError for edges that no resize can fit."""
    size = _resized(_Size(image.height, image.width), settings)
    if size != (image.height, image.width):
        image = image.resize((size.width, size.height), resample=settings.resample)
    if settings.resize == "crop":
        # The corner is that of transformers' center_crop, which pads an image that is too small with black.
        top, left = _first(size.height, settings.height), _first(size.width, settings.width)
        image = image.crop((left, top, left + settings.width, top + settings.height))
    step = settings.patch_size * settings.pool
    grid = settings.height // step, settings.width // step
    return PreparedImage(image.height, image.width, grid, image.tobytes())


def _resized(size: _Size, settings: ImageSettings) -> _Size:
    """Return the size that an image is scaled to."""
    if settings.resize == "fixed":
        return _Size(settings.height, settings.width)
    short, long = min(size), max(size)
    new_long = int(settings.shortest_edge * long / short)
    if new_long * settings.shortest_edge > MAX_RESIZED_PIXELS:
        raise InvalidRequestError(
            f"has {size.width} x {size.height} pixels and is too narrow: with a shorter edge of "
            f"{settings.shortest_edge} it would have more than {MAX_RESIZED_PIXELS}"
        )
    if size.width <= size.height:
        return _Size(new_long, settings.shortest_edge)
    return _Size(settings.shortest_edge, new_long)


def _first(length: int, wanted: int) -> int:
    """Return the first row or column of a crop in the center, as transformers counts: negative where it pads."""
    first = (length - wanted) // 2
    return first if first >= 0 else -ceil((wanted - length) / 2)


def pixel_values(settings: ImageSettings, image: PreparedImage) -> "Array":
    """Return the encoder's input for an image, float32 [3, height, width]: transformers' `pixel_values`."""
    import numpy as np  # noqa: PLC0415 (the process that decodes images does without)

    scaled = (np.arange(256, dtype=np.float64) * settings.scale).astype(np.float32)
    table = (scaled[:, None] - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    table = np.ascontiguousarray(table.T)
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
    return np.stack([table[channel][pixels[:, :, channel]] for channel in range(3)])
