"""Images in tiles (LLaVA-OneVision): transformers' pixels, counts and results, and bits of every schedule."""

import json
import os
import random
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image
from safetensors.torch import load_file, save_file

from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.image_processing import (
    ImageSettings,
    PreparedImage,
    as_rgb,
    best_size,
    pixel_values,
    prepared,
    settings_of_tiles,
    tiled_grid,
)
from quire.core.images import PromptImage
from quire.core.token_ids import pack_tokens
from quire.engine.options import EngineOptions
from quire.engine.requests.image_prompts import image_key
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.kernels.choice import choose_back_end
from quire.model.config import num_parameters, spec_from_config
from quire.model.loader import load_model
from quire_lab.sim.footprint import weight_bytes
from quire_lab.sim.hardware import HARDWARE
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.answers import Answer, answers_of
from support.image_prompts import (
    GREEDY,
    IMAGE,
    NORMALIZED,
    RANDOM,
    answers,
    answers_alone,
    check_every_cut,
    check_greedy_answers,
    check_memory_of_encoding,
    check_preempted,
    check_ranks,
    generate,
    open_llm,
    random_reference,
    save,
    text,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TOLERANCE, HIDDEN, TILE, SIDE = 1e-4, 48, 16, 2    # a tile has 2 x 2 patches of 7 pixels
SIZES = [[16, 16], [16, 32], [32, 16], [32, 32], [16, 64], [64, 48]]
TEXT = {
    "model_type": "qwen2", "vocab_size": 160, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, object] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "patch_size": 7, "image_size": TILE, "vision_use_head": False,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "text_config": TEXT, "vision_config": VISION, "image_token_index": IMAGE, "image_grid_pinpoints": SIZES,
    "vision_aspect_ratio": "anyres_max_4",
}  # fmt: skip
PROCESSOR = {"size": {"height": TILE, "width": TILE}, "image_grid_pinpoints": SIZES, "do_pad": True}
PICTURES = ((20, 30), (9, 50), (64, 48), (16, 16), (40, 11), (21, 30))  # pixels, heights and widths


def make_reference(**changes: object) -> "transformers.PreTrainedModel":
    """Return a model of transformers with random parameters."""
    model = random_reference("LlavaOnevision", CONFIG | changes)
    with torch.no_grad():
        model.model.image_newline.copy_(torch.randn(HIDDEN))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onevision")
    save(make_reference(), path, PROCESSOR)
    return path


def settings_of(processor: dict[str, Any], most: int = 4, size: int = TILE, patch_size: int = 7) -> ImageSettings:
    """Return the settings of a processor."""
    sizes = processor.get("image_grid_pinpoints") or SIZES
    return settings_of_tiles(
        "a test", processor, "llava_onevision", image_token_id=IMAGE, patch_size=patch_size, size=size,
        sizes=tuple((height, width) for height, width in sizes), most_tiles=most,
    )  # fmt: skip


@cache
def original(number: int, mode: str = "RGB") -> Image.Image:
    """Return an image of random pixels."""
    height, width = PICTURES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@cache
def picture(number: int) -> PreparedImage:
    return prepared(original(number), settings_of(PROCESSOR | NORMALIZED))


def values_of(image: PreparedImage) -> np.ndarray:
    return pixel_values(settings_of(PROCESSOR | NORMALIZED), image)


def given(*numbers: int) -> dict[str, torch.Tensor]:
    """Return images as transformers' model takes them."""
    processor = transformers.LlavaOnevisionImageProcessorPil(**PROCESSOR, **NORMALIZED)
    found = processor([original(each) for each in numbers], return_tensors="pt")
    return {"pixel_values": found["pixel_values"], "image_sizes": found["image_sizes"]}


def prompt(*parts: list[int] | int) -> TokenizedPrompt:
    """Return a prompt of texts, lists of ids, and images, their numbers, which are their serials, too."""
    ids, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            own = picture(part)
            num_tokens = settings_of(PROCESSOR).num_tokens(own.grid)
            images.append(PromptImage(len(ids), num_tokens, part, own))
        ids += [IMAGE] * images[-1].num_tokens if isinstance(part, int) else part
    return TokenizedPrompt(None, pack_tokens(ids), None, images=tuple(images))


PROMPTS = (
    prompt(text(1, 9), 0, text(2, 6)), prompt(4, text(3, 3)), prompt(text(1, 9), 1, text(4, 3), 3, text(5, 2)),
    prompt(text(6, 20)), prompt(text(7, 5), 2),
)  # fmt: skip
PARAMS = (GREEDY, RANDOM, GREEDY, RANDOM, GREEDY)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[Answer]]:
    return answers_alone(folder, PROMPTS, PARAMS)


# --- against transformers ---------------------------------------------------------------------------------------------


def test_pixels_are_those_of_transformers() -> None:
    """Images have every mode; tiles are rows of the image, and that of all of it below."""
    settings = settings_of(PROCESSOR)
    processor = transformers.LlavaOnevisionImageProcessorPil(**PROCESSOR)
    draws = random.Random(4)
    sizes = [(1, 1), (16, 16), *((draws.randint(14, 80), draws.randint(14, 80)) for _ in range(20))]
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 4), dtype=np.uint8)
        image = Image.fromarray(pixels).convert(("RGB", "L", "P", "RGBA")[number % 4])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = processor(image, return_tensors="np")["pixel_values"][0]
        own = prepared(as_rgb(image), settings)
        found, (rows, columns) = pixel_values(settings, own), (own.height // TILE - 1, own.width // TILE)
        places = [(rows, 0), *((row, column) for row in range(rows) for column in range(columns))]
        tiles = [found[:, TILE * row : TILE * (row + 1), TILE * col : TILE * (col + 1)] for row, col in places]
        np.testing.assert_array_equal(np.stack(tiles), expected, err_msg=f"{width} x {height}")


@pytest.mark.parametrize("sizes", [None, [[384, 768], [768, 384], [1152, 384], [768, 768]]])
def test_numbers_of_tokens_of_500_sizes_are_those_of_transformers(sizes: list[list[int]] | None) -> None:
    """With the sizes that are published, and others; of 27 x 27 patches a tile."""
    named = {} if sizes is None else {"image_grid_pinpoints": sizes}
    processor = transformers.LlavaOnevisionImageProcessorPil(**named)
    theirs = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    theirs.image_processor, theirs.num_image_tokens, theirs.vision_aspect_ratio = processor, 729, "anyres_max_9"
    pinpoints = processor.image_grid_pinpoints
    own = settings_of({"image_grid_pinpoints": pinpoints, "size": {"height": 384, "width": 384}}, 9, 384, 14)
    draws, num_refused, num_shrunk = random.Random(5), 0, 0
    for _ in range(500):
        height, width = (int(2 ** draws.uniform(0, 12)) for _ in range(2))
        try:
            grid = tiled_grid((height, width), best_size((height, width), own.sizes), 384, 27)
        except InvalidRequestError:
            num_refused += 1
            continue
        assert own.num_tokens(grid) <= own.most_tokens
        num_shrunk += own.num_tokens(grid) < 729 + grid[0] * (grid[1] + 1)
        assert own.num_tokens(grid) == theirs._get_number_of_features(height, width, 384, 384), (height, width)
    assert num_refused < 50
    assert (num_shrunk > 10) == (sizes is None)


@pytest.mark.parametrize("back_end", ["cpp", "torch", "reference"])
@pytest.mark.parametrize(
    "changes", [{}, {"vision_aspect_ratio": "anyres_max_1", "vision_feature_layer": -2}], ids=["plain", "other layer"]
)
def test_a_tower_equals_transformers(changes: dict[str, object], back_end: str, tmp_path: Path) -> None:
    model = make_reference(**changes)
    save(model, tmp_path, PROCESSOR)
    decoder = load_model(tmp_path, back_end=choose_back_end("cpu", back_end))
    tower, order = decoder.vision, range(len(PICTURES))
    assert tower is not None
    found = [torch.as_tensor(np.asarray(tower.encode(values_of(picture(each)), picture(each).grid))) for each in order]  # type: ignore[call-arg]
    with torch.no_grad():
        expected = model.get_image_features(**given(*order)).pooler_output
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert decoder.num_parameters == num_parameters(decoder.spec)
    if back_end == "cpp":
        assert decoder.weight_bytes == weight_bytes(decoder.spec, "float32")


@pytest.mark.parametrize("ratio", ["anyres_max_9", "anyres_max_1"])
def test_encoding_takes_no_more_memory_than_is_planned_for(ratio: str, tmp_path: Path) -> None:
    save(make_reference(vision_aspect_ratio=ratio), tmp_path, PROCESSOR)
    check_memory_of_encoding(tmp_path, picture(2))


def test_answers_equal_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def logits(asked: TokenizedPrompt, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = reference(input_ids=ids, **given(*(each.serial for each in asked.images))).logits
        return found

    check_greedy_answers(folder, PROMPTS[:3], logits)


def test_files_as_published_are_read(folder: Path, tmp_path: Path) -> None:
    renamed = {
        name.replace("model.language_model.", "language_model.model.").removeprefix("model."): each
        for name, each in load_file(folder / "model.safetensors").items()
    }
    renamed = {("language_model." + name if name == "lm_head.weight" else name): each for name, each in renamed.items()}
    assert "image_newline" in renamed
    save_file(renamed, tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with open_llm(folder) as llm, open_llm(tmp_path) as published:
        assert answers(published, PROMPTS[:1]) == answers(llm, PROMPTS[:1])


# --- bits -------------------------------------------------------------------------------------------------------------


def test_batched_requests_have_their_bits(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder, num_kv_blocks=64) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone
        assert answers(llm, PROMPTS[::-1], PARAMS[::-1]) == alone[::-1]    # all found in the cache


def test_batched_requests_of_a_rounded_model_have_their_bits(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder, quantization="int8", max_num_batched_tokens=20) as llm:
        by_themselves = [answers(llm, [each], params)[0] for each, params in zip(PROMPTS, PARAMS, strict=True)]
    assert by_themselves != alone
    with open_llm(folder, num_kv_blocks=64, quantization="int8") as llm:
        assert answers(llm, PROMPTS, PARAMS) == by_themselves


@pytest.mark.usefixtures("forked_processes")
def test_ranks_have_the_bits_of_one(folder: Path, alone: list[list[Answer]]) -> None:
    check_ranks(folder, PROMPTS, PARAMS, alone)


def test_chunks_with_cuts_at_every_place_have_the_bits_of_one(folder: Path, alone: list[list[Answer]]) -> None:
    check_every_cut(folder, PROMPTS[2], alone[2])


def test_prefix_hits_inside_and_behind_images_have_the_bits_of_none(folder: Path, alone: list[list[Answer]]) -> None:
    with open_llm(folder, num_kv_blocks=64) as llm:
        for index in (0, 1, 4):
            each, params, (image, *_) = PROMPTS[index], PARAMS[index], PROMPTS[index].images
            for cut in {image.start, image.start + image.num_tokens} - {0}:
                salted = each.salted(f"{index} {cut}")
                before = (image,) if cut > image.start else ()
                generate(llm, [salted._replace(token_ids=pack_tokens(list(each.token_ids)[:cut]), images=before)])
                (found,) = generate(llm, [salted], params)
                assert answers_of(found) == alone[index]
                assert found.num_cached_tokens >= min(cut, len(each.token_ids) - 1)
            for num_cached in (0, len(each.token_ids) - 1):     # the second one inside of an image that is the end
                (found,) = generate(llm, [each.salted(str(index))], params)
                assert (answers_of(found), found.num_cached_tokens) == (alone[index], num_cached)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_have_their_bits(mode: str, folder: Path) -> None:
    check_preempted(folder, mode, PROMPTS, PARAMS, 40 * HIDDEN * 4, num_blocks=16, max_tokens=50)


def test_forks_and_drafts_have_the_bits_of_none(folder: Path) -> None:
    several, longer = replace(RANDOM, n=3, max_tokens=12), replace(GREEDY, max_tokens=24)
    with open_llm(folder, num_kv_blocks=96) as llm:
        forked, greedy = answers(llm, PROMPTS[:3], several), answers(llm, PROMPTS, longer)
    with open_llm(folder, num_kv_blocks=96, max_num_batched_tokens=13, enable_prefix_caching=False) as llm:
        assert answers(llm, PROMPTS[:3], several) == forked
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with open_llm(folder, num_kv_blocks=64, speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS, longer) == greedy


def test_equal_tiles_of_images_of_other_shapes_are_other_images() -> None:
    """Black images, which are padded with black: only the number of rows tells them apart."""
    settings = settings_of(PROCESSOR)
    first, second = (prepared(Image.new("RGB", size), settings) for size in ((48, 18), (48, 30)))
    assert (first.pixels, first.height, first.width) == (second.pixels, second.height, second.width)
    assert first.grid != second.grid
    assert image_key(first) != image_key(second)


# --- bounds, bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 4)}, r"images\[0\]: must have a grid of at least 1 x 1, got 0 x 4"),
        ({"grid": (9, 4)}, r"images\[0\]: must have tiles of 16 x 16 pixels, got 48 x 32 with a grid of 9 x 4"),
        ({"height": 32}, r"images\[0\]: must have tiles of 16 x 16 pixels|pixels must be 32 x 32 in 3072 bytes"),
        ({"width": 33}, r"images\[0\]: must have tiles of 16 x 16 pixels, got 48 x 33"),
    ],
)
def test_images_that_do_not_fit_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    image = PROMPTS[0].images[0]
    wrong = structs.replace(image, prepared=structs.replace(image.prepared, **change))
    with open_llm(folder) as llm, pytest.raises(InvalidRequestError, match=message):
        generate(llm, [PROMPTS[0]._replace(images=(wrong,))])


def test_images_cost_as_much_as_their_tiles(folder: Path) -> None:
    with open_llm(folder) as llm:
        encodings = llm._engine.engine.scheduler.planner.images
        assert encodings is not None
        inputs = encodings.inputs
    costs = [inputs.cost_of(prompt(number).images[0]) for number in (3, 0, 2)]
    assert [cost // inputs.cost for cost in costs] == [2, 5, 13]


def test_a_plan_tells_what_an_image_takes(folder: Path) -> None:
    own = replace(HARDWARE["H100"], device="cpu")
    found = plan_memory(read_model(str(folder)), own, EngineOptions(str(folder), max_model_len=128))
    shape = Image.new("RGB", (1024, 1024))
    settings = settings_of(PROCESSOR)
    num_tokens = settings.num_tokens(prepared(shape, settings).grid)
    assert (found.image_tokens, found.image_bytes) == (num_tokens, num_tokens * HIDDEN * 4)
    whole, spec = load_model(folder, back_end=choose_back_end("cpu")).weight_bytes, read_model(str(folder)).spec
    assert found.vision_weight_bytes == whole - weight_bytes(replace(spec, vision=None), "float32")


def test_limits_of_pixels_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs .*: the model bounds edges of images, not their area"):
        open_llm(folder, mm_processor_kwargs={"max_pixels": 1000})


@pytest.mark.parametrize(
    ("changes", "vision", "message"),
    [
        ({"image_grid_pinpoints": []}, {}, r"image_grid_pinpoints must be 1 to 64 pairs .*, got \[\]"),
        ({"image_grid_pinpoints": [[16, 20]]}, {}, "a height and a width up to 4096, multiples of image_size 16, got"),
        ({"image_grid_pinpoints": [[16]]}, {}, "image_grid_pinpoints must be 1 to 64 pairs"),
        ({"vision_aspect_ratio": "pad"}, {}, "vision_aspect_ratio must be anyres_max_N with N from 1 to 99, got 'pad'"),
        ({"vision_aspect_ratio": 9}, {}, "vision_aspect_ratio must be anyres_max_N"),
        ({"vision_feature_select_strategy": "default"}, {}, "vision_feature_select_strategy must be one of full"),
        ({}, {"model_type": "clip_vision_model"}, "model_type must be one of siglip_vision_model"),
    ],
)
def test_encoders_that_cannot_be_served_are_refused(
    changes: dict[str, Any], vision: dict[str, Any], message: str
) -> None:
    own = CONFIG | changes | {"vision_config": VISION | vision}
    with pytest.raises(ModelError, match=message):
        spec_from_config({"architectures": ["LlavaOnevisionForConditionalGeneration"], **own})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 32, "width": 32}}, "gives tiles of 32 x 32 pixels, and the encoder of config.json reads"),
        ({"do_center_crop": True}, "do_center_crop must be false, got True"),
        ({"tiles": 4}, "the settings tiles are not known"),
    ],
)
def test_settings_that_would_give_other_pixels_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        settings_of(PROCESSOR | changes)
    other = json.loads(json.dumps(PROCESSOR)) | {"image_grid_pinpoints": SIZES[:2]}
    with pytest.raises(ModelError, match=r"image_grid_pinpoints .* are not those of config\.json"):
        settings_of_tiles(
            "a test", other, "llava_onevision", image_token_id=IMAGE, patch_size=7, size=TILE,
            sizes=tuple((height, width) for height, width in SIZES), most_tiles=4,
        )  # fmt: skip


def test_an_image_that_no_patch_shows_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="has 1 x 900 pixels and is too narrow: no patch would show it"):
        prepared(Image.new("RGB", (1, 900)), settings_of(PROCESSOR))


def test_an_image_that_keeps_no_row_is_refused() -> None:
    """Scaled to one tile's rows, a strip of many tiles would keep less than one."""
    processor = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 28], [28, 4088]]}
    with pytest.raises(InvalidRequestError, match="has 200 x 1 pixels and is too narrow: no row or column of it"):
        prepared(Image.new("RGB", (200, 1)), settings_of(processor, most=1, size=28, patch_size=14))
