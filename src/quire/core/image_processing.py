"""Processing of images as a model's files say: decoding, resizing, and the input of its encoder.

A decoded image is resized by Pillow to the size that the model reads, as transformers' `*ImageProcessorPil` classes do.
The rest, rescaling and normalization, depends on the 8 bits of a value alone and is a table (`pixel_values`), so that
pixels are 8 bits a value until they are encoded, and the process that decodes images does without NumPy.
"""

from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from math import ceil, floor, inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from quire.core.checks import shown
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.model_files import read_json_object
from quire.core.optional_package import needs_library

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.core.arrays import Array  # loads NumPy: the process that decodes images does without

Resize = Literal["crop", "fixed", "any", "bounded", "tiles"]
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MAX_EDGE = 4096             # longest edge behind a resize to one size, in pixels; models have 224 to 1,540
MAX_PATCHES = 1 << 16       # an image of any size has no more; Qwen-VL's have at most as many
MAX_KEPT = 1.1              # root of tiles of rows by those that an image keeps; of more it keeps fewer
MAX_ASPECT = 200            # sides of an image of any size; transformers refuses others, too
MAX_RESIZED_PIXELS = 1 << 25  # between the resize and the crop, where a strip would need gigabytes
PILLOWS_PIXELS = 178_956_970  # past these Pillow refuses to open a file
MAX_IMAGE_PIXELS = 1 << 25  # as a file's header says; larger images are not decoded
_PIXELS_AT_ONCE = 1 << 16   # NumPy makes an index of 8 bytes of each
MAX_CONSTANT, LEAST_STD = 1e6, 1e-6  # a processor's: values of pixels are finite in float32; models have 0.004 to 0.6


class PreparedImage(msgspec.Struct, array_like=True, frozen=True):
    """An image as a model gets it: 8-bit RGB pixels, [height, width, 3], and the grid of the tower's outputs."""

    height: int
    width: int
    grid: tuple[int, int]
    pixels: bytes


class ImageSettings(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a model's image processor, and the tokens of an image in a prompt.

    `resize`: "crop" scales the shorter edge to `shortest_edge` and cuts height x width from the center; "fixed" scales
    to height x width; "any" scales both edges alike, to multiples of patch_size * pool with `min_pixels` to
    `max_pixels` in all; "bounded" scales larger images down to height x width at most, both edges alike, and then each
    up to a multiple; "tiles" scales to one of `sizes`, both edges alike, pads with black to it, and puts a tile of
    height x width, the image scaled to that, below. `resample`: Pillow's number of a filter. `pool`: patches of a row
    that one token stands for. `num_extra`: tokens of an image beside its patches. `has_row_ends`: one of text stands
    behind each row of them. `most_tiles`: tiles with as many tokens as an image has, beside those of all of it.
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
    min_pixels: int = 0
    max_pixels: int = 0
    has_row_ends: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    most_tiles: int = 0

    @property
    def unit(self) -> int:
        """Rows of pixels, and columns, that one token stands for."""
        return self.patch_size * self.pool

    @property
    def least_tokens(self) -> int:
        """Fewest placeholders of an image of any size."""
        if self.resize == "tiles":
            return (self.height // self.patch_size) ** 2 + 2
        return max(1, ceil(self.min_pixels / self.unit**2)) + self.has_row_ends

    @property
    def most_tokens(self) -> int:
        """Most placeholders of an image."""
        if self.resize == "any":
            return min(self.max_pixels // self.unit**2, MAX_PATCHES // self.pool**2)
        if self.resize == "tiles":
            side = self.height // self.patch_size
            most = int(MAX_KEPT**2 * self.most_tiles * side**2)
            grids = ((height // self.height * side, width // self.width * side) for height, width in self.sizes)
            return side**2 + max(min(rows * columns, most) + rows for rows, columns in grids)
        return self.num_tokens((ceil(self.height / self.unit), ceil(self.width / self.unit)))

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of placeholders of an image with a grid."""
        if self.resize == "tiles":
            side = self.height // self.patch_size
            rows, columns = shrunk(grid, side, self.most_tiles)
            return side**2 + rows * (columns + 1)
        return grid[0] * (grid[1] + self.has_row_ends) + self.num_extra

    def num_tiles(self, image: PreparedImage) -> int:
        """Return the tiles of an image, that of all of it included."""
        return (image.height // self.height - 1) * (image.width // self.width) + 1

    def has_tiles(self, image: PreparedImage) -> bool:
        """Return whether an image has one of the sizes, and a grid of it."""
        side, size = self.height // self.patch_size, (image.height - self.height, image.width)
        most = (edge // self.height * side for edge in size)
        return size in self.sizes and all(0 < own <= limit for own, limit in zip(image.grid, most, strict=True))


# --- settings ---------------------------------------------------------------------------------------------------------

_CLIP = {
    "do_center_crop": True, "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711),
}  # fmt: skip
_GEMMA3 = {
    "do_center_crop": False, "size": {"height": 224, "width": 224}, "resample": 2,
    "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip
_QWEN_VL = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "resample": 3, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": _CLIP["image_mean"], "image_std": _CLIP["image_std"],
}  # fmt: skip
_PIXTRAL = {
    "size": {"longest_edge": 1024}, "resample": 3, "patch_size": 16, "image_mean": _CLIP["image_mean"],
    "image_std": _CLIP["image_std"],
}  # fmt: skip
_ONEVISION = {
    "size": {"height": 384, "width": 384}, "resample": 3, "image_mean": _CLIP["image_mean"],
    "image_std": _CLIP["image_std"],
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {    # transformers'
    "llava": _CLIP, "gemma3": _GEMMA3, "qwen2_vl": _QWEN_VL, "qwen2_5_vl": _QWEN_VL, "qwen3_vl": _QWEN_VL,
    "pixtral": _PIXTRAL, "llava_onevision": _ONEVISION,
}  # fmt: skip
_READ = frozenset((
    "do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb", "do_pad", "do_pan_and_scan", "size",
    "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "default_to_square",
))  # fmt: skip
_READ_OF_ANY_SIZE = frozenset(("patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels"))
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
    given = _given(where, processor, family)
    _check_keys(where, given, _READ)
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
        std=_numbers(where, "image_std", given["image_std"], LEAST_STD),
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


class PixelLimits(NamedTuple):
    """Fewest and most pixels of an image behind its resize, in place of those of a model's files; None: as these."""

    least: int | None = None
    most: int | None = None


def settings_of_any_size(
    where: str, processor: Mapping[str, Any], family: str, *, image_token_id: int, patch_size: int, pool: int,
    num_frames: int, limits: PixelLimits = PixelLimits(),  # noqa: B008 (a tuple)
) -> ImageSettings:  # fmt: skip
    """Return the settings of a processor, by the keys of its file `where`, for an encoder of images of any size.

    `limits`: of an operator. ModelError as in `image_settings`; ConfigError for limits that exclude all images.
    """
    given = _given(where, processor, family)
    _check_keys(where, given, _READ | _READ_OF_ANY_SIZE)
    size = given["size"] if isinstance(given["size"], dict) else {}
    own = [given.get("min_pixels", size.get("shortest_edge")), given.get("max_pixels", size.get("longest_edge"))]
    least, most = (
        _integer(where, name, value, 1, PILLOWS_PIXELS)
        for name, value in zip(("min_pixels", "max_pixels"), own, strict=True)
    )
    for name, value in (("patch_size", patch_size), ("temporal_patch_size", num_frames), ("merge_size", pool)):
        if given[name] != value:
            raise ModelError(f"{where}: {name} {shown(given[name])} is not the encoder's of config.json, {value}")
    error: type[ModelError | ConfigError] = ModelError
    if limits.least is not None or limits.most is not None:
        error, where = ConfigError, "mm_processor_kwargs"
        least, most = limits.least or least, limits.most or most
    if least > most:
        raise error(f"{where}: min_pixels {least} is above max_pixels {most}")
    if most > MAX_PATCHES * patch_size**2:
        raise error(f"{where}: max_pixels must be at most {MAX_PATCHES * patch_size**2}, {MAX_PATCHES} patches")
    return ImageSettings(
        family=family,
        image_token_id=image_token_id,
        patch_size=patch_size,
        resize="any",
        height=0,
        width=0,
        resample=_integer(where, "resample", given["resample"], 0, 5),
        scale=_number(where, "rescale_factor", given.get("rescale_factor", 1 / 255)),
        mean=_numbers(where, "image_mean", given["image_mean"]),
        std=_numbers(where, "image_std", given["image_std"], LEAST_STD),
        pool=pool,
        min_pixels=least,
        max_pixels=most,
    )


def settings_of_bounded_size(
    where: str, processor: Mapping[str, Any], family: str, *, image_token_id: int, patch_size: int, pool: int
) -> ImageSettings:
    """Return the settings of a processor, by the keys of its file `where`, that scales images down to a size at most.

    ModelError as in `image_settings`.
    """
    given = _given(where, processor, family)
    _check_keys(where, given, _READ | {"patch_size"}, off=("do_center_crop", "do_pan_and_scan"))
    size, unit = given["size"], patch_size * pool
    if not isinstance(size, dict):
        size = {"longest_edge": size}
    longest = size.get("longest_edge")
    height, width = (longest, longest) if longest else (size.get("height"), size.get("width"))
    height = _integer(where, "size", height, 1, MAX_EDGE)
    width = _integer(where, "size", width, 1, MAX_EDGE)
    if ceil(height / unit) * ceil(width / unit) * pool**2 > MAX_PATCHES:
        raise ModelError(f"{where}: size {shown(size)} gives more than {MAX_PATCHES} patches of {patch_size} pixels")
    edge = given["patch_size"]
    edges = set(edge.values()) if isinstance(edge, dict) else {edge}
    if edges not in ({patch_size}, {unit}):
        raise ModelError(f"{where}: patch_size {shown(edge)} is not the encoder's of config.json, {patch_size}")
    return ImageSettings(
        family=family,
        image_token_id=image_token_id,
        patch_size=patch_size,
        resize="bounded",
        height=height,
        width=width,
        resample=_integer(where, "resample", given["resample"], 0, 5),
        scale=_number(where, "rescale_factor", given.get("rescale_factor", 1 / 255)),
        mean=_numbers(where, "image_mean", given["image_mean"]),
        std=_numbers(where, "image_std", given["image_std"], LEAST_STD),
        pool=pool,
        has_row_ends=True,
    )


def settings_of_tiles(
    where: str, processor: Mapping[str, Any], family: str, *, image_token_id: int, patch_size: int, size: int,
    sizes: tuple[tuple[int, int], ...], most_tiles: int,
) -> ImageSettings:  # fmt: skip
    """Return the settings of a processor, by the keys of its file `where`, for an encoder of tiles; rest as there.

    `sizes`: of images, by config.json. ModelError as in `image_settings`.
    """
    given = _given(where, processor, family)
    _check_keys(where, given, _READ | {"image_grid_pinpoints"}, off=("do_center_crop", "do_pan_and_scan"))
    pinpoints = given.get("image_grid_pinpoints")
    if pinpoints is not None and pinpoints != [list(each) for each in sizes]:
        raise ModelError(f"{where}: image_grid_pinpoints {shown(pinpoints)} are not those of config.json")
    target, _ = _size(where, {**given, "do_center_crop": False})
    settings = ImageSettings(
        family=family,
        image_token_id=image_token_id,
        patch_size=patch_size,
        resize="tiles",
        height=_integer(where, "height", target.get("height"), 1, MAX_EDGE),
        width=_integer(where, "width", target.get("width"), 1, MAX_EDGE),
        resample=_integer(where, "resample", given["resample"], 0, 5),
        scale=_number(where, "rescale_factor", given.get("rescale_factor", 1 / 255)),
        mean=_numbers(where, "image_mean", given["image_mean"]),
        std=_numbers(where, "image_std", given["image_std"], LEAST_STD),
        sizes=sizes,
        most_tiles=most_tiles,
    )
    if (settings.height, settings.width) != (size, size):
        raise ModelError(
            f"{where} gives tiles of {settings.height} x {settings.width} pixels, and the encoder of config.json "
            f"reads {size} x {size}"
        )
    return settings


def _given(where: str, processor: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the settings of a processor over those that transformers has for a family."""
    if family not in _DEFAULTS:
        raise ModelError(f"{where}: images of a {family} are not read")
    return {**_DEFAULTS[family], **{key: value for key, value in processor.items() if value is not None}}


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


def _check_keys(
    where: str, given: Mapping[str, Any], read: frozenset[str], off: Collection[str] = ("do_pad", "do_pan_and_scan")
) -> None:
    """Raise ModelError for a setting that is not known, or that would change pixels."""
    unknown = sorted(given.keys() - read - _IGNORED)
    if unknown:
        raise ModelError(f"{where}: the settings {', '.join(unknown)} are not known, and may change pixels")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(name, True) is not True:
            raise ModelError(f"{where}: {name} must be true, got {shown(given[name])}")
    for name in off:
        if given.get(name):
            raise ModelError(f"{where}: {name} must be false, got {shown(given[name])}")


def _size(where: str, given: Mapping[str, Any]) -> tuple[Mapping[str, Any], object]:
    """Return the size of images behind the resize, and the shorter edge that they are scaled to; 0: to that size."""
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


def _number(where: str, name: str, value: object, low: float = -MAX_CONSTANT) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= MAX_CONSTANT:
        raise ModelError(f"{where}: {name} must be a number from {low:g} to {MAX_CONSTANT:g}, got {shown(value)}")
    return float(value)


def _numbers(where: str, name: str, values: object, low: float = -MAX_CONSTANT) -> tuple[float, float, float]:
    if not isinstance(values, list | tuple) or len(values) != 3:
        raise ModelError(f"{where}: {name} must be a list of three numbers, got {shown(values)}")
    red, green, blue = (_number(where, name, value, low) for value in values)
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
    if image.mode == "I;16":
        image = _grey_in_8_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def _grey_in_8_bits(image: "Image") -> "Image":
    """Return a grey image of 16 bits a value (a PNG's) as its high bytes, which is how Pillow reads colours of 16 bits.

    Pillow's `convert` clips instead: all values past 255, nearly the whole range, become white, and it ignores the
    value that is transparent (Pillow 11.0.0 to 13.0.0).
    """
    clear = image.info.pop("transparency", None)
    values = image.convert("I")
    grey = values.point([value >> 8 for value in range(1 << 16)], "L")
    if clear is not None:
        grey.putalpha(values.point([255 * (value != clear) for value in range(1 << 16)], "L"))
    return grey


class _Size(NamedTuple):
    height: int
    width: int


def prepared(image: "Image", settings: ImageSettings) -> PreparedImage:
    """Return an RGB image of Pillow as the model gets it. InvalidRequestError for edges that no resize can fit."""
    if settings.resize == "tiles":
        return _tiled(image, settings)
    size = _resized(_Size(image.height, image.width), settings)
    if size != (image.height, image.width):
        image = image.resize((size.width, size.height), resample=settings.resample)
    if settings.resize == "crop":
        # The corner is that of transformers' center_crop, which pads an image that is too small with black.
        top, left = _first(size.height, settings.height), _first(size.width, settings.width)
        image = image.crop((left, top, left + settings.width, top + settings.height))
    grid = image.height // settings.unit, image.width // settings.unit
    return PreparedImage(image.height, image.width, grid, image.tobytes())


def _resized(size: _Size, settings: ImageSettings) -> _Size:
    """Return the size that an image is scaled to."""
    if settings.resize == "fixed":
        return _Size(settings.height, settings.width)
    if settings.resize == "any":
        return _multiples(size, settings)
    if settings.resize == "bounded":
        return _bounded(size, settings)
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


def _multiples(size: _Size, settings: ImageSettings) -> _Size:
    """Return the multiples of a token's pixels that an image is scaled to, as Qwen-VL's processors choose them."""
    unit, (height, width) = settings.unit, size
    if max(size) > MAX_ASPECT * min(size):
        raise InvalidRequestError(
            f"has {width} x {height} pixels and is too narrow: one edge may be {MAX_ASPECT} times the other"
        )
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    if new_height * new_width > settings.max_pixels:
        shrunk = sqrt(height * width / settings.max_pixels)
        new_height, new_width = (max(unit, floor(edge / shrunk / unit) * unit) for edge in size)
    elif new_height * new_width < settings.min_pixels:
        grown = sqrt(settings.min_pixels / (height * width))
        new_height, new_width = (ceil(edge * grown / unit) * unit for edge in size)
    if new_height * new_width > MAX_PATCHES * settings.patch_size**2:
        raise InvalidRequestError(
            f"has {width} x {height} pixels, and scaled to {new_width} x {new_height} more than {MAX_PATCHES} patches"
        )
    return _Size(new_height, new_width)


def _bounded(size: _Size, settings: ImageSettings) -> _Size:
    """Return the multiples of a token's pixels that an image is scaled to, as Pixtral's processor chooses them."""
    (height, width), unit = size, settings.unit
    ratio = max(height / settings.height, width / settings.width)
    if ratio > 1:
        height, width = floor(height / ratio), floor(width / ratio)
    if not height or not width:
        raise InvalidRequestError(
            f"has {size.width} x {size.height} pixels and is too narrow: scaled to {settings.width} x "
            f"{settings.height} at most it would have none"
        )
    return _Size(((height - 1) // unit + 1) * unit, ((width - 1) // unit + 1) * unit)


def _tiled(image: "Image", settings: ImageSettings) -> PreparedImage:
    """Return an image as tiles, as LLaVA-OneVision's processor makes them of a single one."""
    from PIL import Image  # noqa: PLC0415 (an extra)

    size, tile = _Size(image.height, image.width), settings.height
    height, width = best_size(size, settings.sizes)
    grid = tiled_grid(size, (height, width), tile, side := tile // settings.patch_size)
    if min(shrunk(grid, side, settings.most_tiles)) < 1:
        raise InvalidRequestError(
            f"has {size.width} x {size.height} pixels and is too narrow: no row or column of it would be kept"
        )
    by_width, by_height = width / size.width, height / size.height
    if by_width < by_height:
        scaled = _Size(min(ceil(size.height * by_width), height), width)
    else:
        scaled = _Size(height, min(ceil(size.width * by_height), width))
    canvas = Image.new("RGB", (width, height + tile))
    left, top = (width - scaled.width) // 2, (height - scaled.height) // 2
    canvas.paste(image.resize((scaled.width, scaled.height), resample=settings.resample), (left, top))
    canvas.paste(image.resize((tile, tile), resample=settings.resample), (0, height))
    return PreparedImage(canvas.height, canvas.width, grid, canvas.tobytes())


def best_size(size: tuple[int, int], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that shows the most pixels of an image, of equal ones that with the fewest others."""
    (own_height, own_width), best, most, fewest = size, sizes[0], 0, inf
    for height, width in sizes:
        scale = min(width / own_width, height / own_height)
        shown_pixels = min(int(own_width * scale) * int(own_height * scale), own_width * own_height)
        others = height * width - shown_pixels
        if shown_pixels > most or (shown_pixels == most and others < fewest):
            best, most, fewest = (height, width), shown_pixels, others
    return best


def tiled_grid(size: tuple[int, int], scaled: tuple[int, int], tile: int, side: int) -> tuple[int, int]:
    """Return the rows and columns of what an encoder gives for an image of a size, without those of its padding.

    `scaled`: the height and width that it is scaled and padded to. `side`: rows that it gives for a tile.
    InvalidRequestError for an image without any.
    """
    (height, width), (rows, columns) = size, (edge // tile * side for edge in scaled)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if min(rows, columns) < 1:
        raise InvalidRequestError(f"has {width} x {height} pixels and is too narrow: no patch would show it")
    return rows, columns


def shrunk(grid: tuple[int, int], side: int, most_tiles: int) -> tuple[int, int]:
    """Return the rows and columns that an image keeps: at most about as many as a number of tiles have."""
    rows, columns = grid
    ratio = sqrt(rows * columns / (most_tiles * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > MAX_KEPT else grid


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
    values, num_rows = np.empty((3, image.height, image.width), np.float32), max(1, _PIXELS_AT_ONCE // image.width)
    for first in range(0, image.height, num_rows):
        rows = slice(first, first + num_rows)
        for channel in range(3):
            np.take(table[channel], pixels[rows, :, channel], out=values[channel, rows], mode="clip")
    return values
