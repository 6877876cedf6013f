"""Encoders of images in files of their own: the answers of the folder that they were made from, and clear errors."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from numpy.testing import assert_array_equal
from PIL import Image
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.image_processing import PixelLimits
from quire.engine.formats import read_source
from quire.engine.loading import load
from quire.engine.options import EngineOptions
from quire.formats.gguf.gguf_file import GGUFFile, MetadataArray
from quire.kernels.choice import choose_back_end
from quire.model.config import num_parameters
from quire.model.loader import load_model
from quire.model.source import image_settings_of, read_folder
from quire_lab.sim.planning import stored_parameters
from support.gguf_files import Stored, as_is, convert, tokenizer_metadata, write_gguf, write_with_projector
from support.small_vision import NUM_TOKENS, write_gemma3, write_llava, write_mistral3, write_qwen_vl

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

WINDOW = 112  # pixels; no file has Qwen2.5-VL's
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llava": write_llava, "gemma3": write_gemma3, "mistral3": write_mistral3,
    "pixtral": partial(write_mistral3, family="Llava"),
    "qwen2_5_vl": partial(write_qwen_vl, family="Qwen2_5_VL", window_size=WINDOW),
    "qwen3_vl_moe": partial(write_qwen_vl, family="Qwen3VLMoe", deepstack_visual_indexes=[0, 1]),
    "qwen3_5": partial(write_qwen_vl, family="Qwen3_5"),
}  # fmt: skip
ENCODERS: dict[str, Callable[[Path], Path]] = FAMILIES | {
    "qwen2_vl": partial(write_qwen_vl, family="Qwen2VL", embed_dim=32, hidden_size=48, mlp_ratio=2),
    "qwen3_vl": partial(write_qwen_vl, family="Qwen3VL", deepstack_visual_indexes=[1], depth=3),
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=ENCODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ENCODERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_with_projector(folder, tmp_path_factory.mktemp("files"))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 130, 3), dtype=np.uint8))


def answers(model: Path, **settings: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], list[float]]]:  # noqa: ANN401
    """Return the prompts' ids, the answers' ids and their logprobs of two conversations with images."""
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "What?"}]}]
        for seed in (1, 2)
    ]
    with LLM(model, num_kv_blocks=64, block_size=8, dtype="float32", **settings) as llm:
        found = llm.chat(conversations, PARAMS, use_tqdm=False)
    chosen = [(each.prompt_token_ids, each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]
    return [
        (tuple(prompt), tuple(ids), [entry[token].logprob for entry, token in zip(logprobs, ids, strict=True)])
        for prompt, ids, logprobs in chosen
    ]


def pixel_limits(folder: Path) -> str:
    """Return the limits of a Qwen-VL's folder, which files leave out, as JSON of `mm_processor_kwargs`."""
    given = json.loads((folder / "preprocessor_config.json").read_text())
    return json.dumps({key: given[key] for key in ("min_pixels", "max_pixels") if key in given})


def test_answers_are_those_of_the_folder(folder: Path, files: tuple[Path, Path]) -> None:
    text, projector = files
    if folder.name.removesuffix("0") not in FAMILIES:
        pytest.skip("its encoder alone is compared: the text model is that of another family here")
    limits = pixel_limits(folder)
    expected = answers(folder, mm_processor_kwargs=limits)
    found = answers(text, mmproj=str(projector), mm_processor_kwargs=limits)
    assert found[0][0] != found[1][0] or found[0][1:] != found[1][1:]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:2] == theirs[:2]
        np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=1e-5)


def is_half(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and "position" not in name and "pos_embed" not in name


def test_files_in_half_precision_have_the_rows_of_the_folder(folder: Path, tmp_path: Path) -> None:
    def half(name: str, tensor: torch.Tensor) -> Stored:
        return as_is(name, tensor.half() if is_half(name, tensor) else tensor)

    (tmp_path / "rounded").mkdir()
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: each.half().float() if is_half(name, each) else each for name, each in tensors.items()}
    save_file(rounded, tmp_path / "rounded" / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path / "rounded")
    text, projector = write_with_projector(folder, tmp_path, half)
    back_end, found = choose_back_end("cpu", "cpp"), list[np.ndarray]()
    for source in (read_source(text, mmproj=str(projector)), tmp_path / "rounded"):
        tower = load_model(source, back_end=back_end, dtype="float32").vision
        assert tower is not None
        side, unit = tower.spec.image_size, tower.spec.unit
        size = (side, side) if side else (2 * unit, 5 * unit)
        pixels = np.random.default_rng(0).standard_normal((3, *size), np.float32)
        found.append(np.asarray(tower.encode(pixels)).copy())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


def test_settings_of_pixels_are_those_of_the_folder(folder: Path, files: tuple[Path, Path]) -> None:
    text, projector = files
    found = []
    for source in (read_folder(folder), read_source(text, mmproj=str(projector))):
        assert source.spec.vision is not None
        settings = image_settings_of(source, source.spec.vision, PixelLimits())
        assert settings is not None
        found.append(settings)
    expected, ours = found
    if expected.resize == "any":  # published folders' limits, which files leave out
        least = 64 if expected.family == "qwen3_vl" else 4
        assert (ours.min_pixels, ours.max_pixels) == (least * 28**2, 16_384 * 28**2)
        ours = structs.replace(ours, min_pixels=expected.min_pixels, max_pixels=expected.max_pixels)
    assert_array_equal(np.float32([ours.mean, ours.std]), np.float32([expected.mean, expected.std]))
    assert structs.replace(ours, mean=expected.mean, std=expected.std) == expected


def test_parameters_of_both_files_are_counted(files: tuple[Path, Path]) -> None:
    text, projector = files
    assert stored_parameters(text, str(projector)) == num_parameters(read_source(text, mmproj=str(projector)).spec)


def test_a_vocabulary_without_a_token_for_images_has_the_unknown_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    folder = write_llava(tmp_path / "folder")
    (tmp_path / "files").mkdir()
    text, projector = write_with_projector(folder, tmp_path / "files")
    tokens = tokenizer_metadata(folder, "gpt-2")["tokenizer.ggml.tokens"]
    other = ["<other>" if token == "<image>" else token for token in tokens]
    changed = {"tokenizer.ggml.tokens": other, "tokenizer.ggml.unknown_token_id": tokens.index("<pad>")}
    convert(tmp_path / "files", text, **changed)
    found = answers(text, mmproj=str(projector))
    assert [ids.count(tokens.index("<pad>")) for ids, _, _ in found] == [NUM_TOKENS] * 2
    assert found[0][1:] != found[1][1:]
    convert(tmp_path / "files", text, **changed | {"tokenizer.ggml.unknown_token_id": None})
    with pytest.raises(ModelError, match=r"tokens has no <image>, and there is no tokenizer.ggml.unknown_token_id"):
        read_source(text, mmproj=str(projector))


def spoiled(file: Path, target: Path, changes: dict[str, object], without: str = "") -> Path:
    """Write a file with other metadata, and without some tensors."""
    read = GGUFFile(file)
    metadata = {
        key: list(read.numbers(key)) if isinstance(value, MetadataArray) else value
        for key, value in (read.metadata | changes).items()
        if value is not None
    }
    tensors = {
        name: (each.type.name, each.shape, bytes(read.map[each.offset : each.offset + each.num_bytes]))
        for name, each in read.tensors.items()
        if name != without
    }
    return write_gguf(target, metadata, tensors)


@pytest.mark.parametrize(
    ("changes", "without", "expected"),
    [
        ({"general.architecture": "llama"}, "", "general.architecture must be 'clip' .* got 'llama'"),
        ({"clip.projector_type": "ldp"}, "", r"clip.projector_type must be one of mlp, gemma3, .*pixtral, got 'ldp'"),
        ({"clip.vision.image_mean": None}, "", "clip.vision.image_mean must be an array of three numbers, got None"),
        ({"clip.vision.image_mean": [0.5, 0.5]}, "", "image_mean must be an array of three numbers, got an array of 2"),
        ({"clip.vision.image_aspect_ratio": "pad"}, "", "image_aspect_ratio = 'pad' is not supported yet: images"),
        ({"clip.vision.image_grid_pinpoints": [336, 672]}, "", "image_grid_pinpoints .* is not supported yet"),
        ({"clip.vision.feature_layer": [3]}, "", r"feature_layer must be a list of one number from 1 to 2, got \[3"),
        ({"clip.vision.block_count": 3}, "", "tensor v.blk.2.ln1.weight is missing"),
        ({"clip.vision.image_size": 35}, "", r"position_embd.weight has shape \[17, 32\], expected \[26, 32\]"),
        ({}, "v.class_embd", "mmproj.gguf: tensor v.class_embd is missing"),
        ({}, "mm.2.weight", "tensor mm.2.weight is missing"),
    ],
)
def test_files_that_are_wrong_are_refused(
    changes: dict[str, object], without: str, expected: str, llava: tuple[Path, Path], tmp_path: Path
) -> None:
    text, projector = llava
    file = spoiled(projector, tmp_path / "mmproj.gguf", changes, without)
    options = EngineOptions(model=str(text), mmproj=str(file), dtype="float32", device="cpu")
    with pytest.raises(ModelError, match=expected):
        load(options, text)


WRONG: list[tuple[str, dict[str, object], str, str]] = [
    ("qwen2_5_vl", {}, "v.patch_embd.weight.1", "tensor v.patch_embd.weight.1 is missing"),
    ("qwen2_5_vl", {}, "v.blk.1.ffn_gate.weight", "tensor v.blk.1.ffn_gate.weight is missing"),
    ("qwen2_5_vl", {"clip.vision.n_wa_pattern": None}, "", "clip.vision.n_wa_pattern is missing"),
    ("qwen2_5_vl", {"clip.use_gelu": True}, "", "clip.use_gelu and use_silu are both true"),
    ("qwen2_5_vl", {"clip.vision.projection_dim": 64}, "", "out_hidden_size 64 must be the text .* hidden_size 48"),
    ("qwen3_vl", {}, "v.deepstack.1.fc2.weight", "tensor v.deepstack.1.fc2.weight is missing"),
    ("qwen3_vl", {"clip.vision.is_deepstack_layers": [True, True, False]}, "", "marks 2 layers, and .* = 1"),
    ("qwen3_vl", {"clip.vision.is_deepstack_layers": [True]}, "", "must be a list of 3 numbers"),
    ("qwen3_vl", {}, "v.post_ln.weight", "tensor v.post_ln.weight is missing"),
    ("mistral3", {}, "mm.patch_merger.weight", "there is no tensor mm.patch_merger"),
    ("mistral3", {}, "mm.input_norm.weight", "tensor mm.input_norm.weight is missing"),
    ("pixtral", {"clip.use_gelu": None}, "", "hidden_act must be one of gelu, silu, got 'quick_gelu'"),
]


@pytest.mark.parametrize(("family", "changes", "without", "expected"), WRONG)
def test_files_of_any_size_that_are_wrong_are_refused(
    family: str, changes: dict[str, object], without: str, expected: str, written: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:  # fmt: skip
    text, projector = written(family)
    file = spoiled(projector, tmp_path / "mmproj.gguf", changes, without)
    with pytest.raises(ModelError, match=expected):
        load(EngineOptions(model=str(text), mmproj=str(file), dtype="float32", device="cpu"), text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    @cache
    def write(family: str) -> tuple[Path, Path]:
        return write_with_projector(ENCODERS[family](tmp_path_factory.mktemp("own")), tmp_path_factory.mktemp("two"))

    return write


def test_sections_of_rotary_pairs_are_checked(written: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    text, projector = written("qwen3_vl")
    key, others = "qwen3vl.rope.dimension_sections", {"qwen3vl.n_deepstack_layers": 1}
    for sections, expected in ((None, "it is missing"), ([4, 2, 2], "must be 4 numbers"), ([4, 2, 1, 0], "mrope_sect")):
        file = convert(text.parent, tmp_path / "text.gguf", **others, **{key: sections})
        with pytest.raises(ModelError, match=expected):
            read_source(file, mmproj=str(projector))


def test_a_feature_layer_and_newer_names_are_read(llava: tuple[Path, Path], tmp_path: Path) -> None:
    text, projector = llava
    read = GGUFFile(projector)
    swapped = {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}
    renamed = {
        re.sub("ffn_down|ffn_up", lambda found: swapped[found[0]], name): (
            each.type.name, each.shape, bytes(read.map[each.offset : each.offset + each.num_bytes])
        )
        for name, each in read.tensors.items()
    }  # fmt: skip
    metadata = {
        key: list(read.numbers(key)) if isinstance(value, MetadataArray) else value
        for key, value in read.metadata.items()
    }
    newer = write_gguf(tmp_path / "mmproj.gguf", metadata | {"clip.vision.feature_layer": [2]}, renamed)
    pixels = np.random.default_rng(0).standard_normal((3, 28, 28), np.float32)
    found = []
    for file in (projector, newer):
        tower = load_model(read_source(text, mmproj=str(file)), back_end=choose_back_end("cpu", "cpp")).vision
        assert tower is not None
        found.append(np.asarray(tower.encode(pixels)).copy())
    assert np.array_equal(*found)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_with_projector(write_llava(tmp_path_factory.mktemp("folder")), tmp_path_factory.mktemp("llava"))


def test_an_encoder_of_another_family_is_refused(llava: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "gemma3").mkdir()
    other = write_with_projector(write_gemma3(tmp_path / "gemma3"), tmp_path)[1]
    with pytest.raises(ModelError, match=r"is an encoder for gemma3, and .* is of 'llama'"):
        read_source(llava[0], mmproj=str(other))


def test_a_norm_of_integers_is_refused(tmp_path: Path) -> None:
    """It is stored plus 1 in a Gemma 3's file, so its values are computed while they are read."""
    (tmp_path / "folder").mkdir()
    text, projector = write_with_projector(write_gemma3(tmp_path / "folder"), tmp_path)
    read, name = GGUFFile(projector), "mm.soft_emb_norm.weight"
    tensors = {
        each: (entry.type.name, entry.shape, bytes(read.map[entry.offset : entry.offset + entry.num_bytes]))
        for each, entry in read.tensors.items()
    }
    (width,) = read.tensors[name].shape
    metadata = {
        key: list(read.numbers(key)) if isinstance(value, MetadataArray) else value
        for key, value in read.metadata.items()
    }
    file = write_gguf(tmp_path / "integers.gguf", metadata, tensors | {name: ("I8", (width,), bytes(width))})
    options = EngineOptions(model=str(text), mmproj=str(file), dtype="float32", device="cpu")
    with pytest.raises(ModelError, match=f"tensor {name} has dtype I8, expected one of F64, F32, F16, BF16"):
        load(options, text)


def test_settings_that_have_no_encoder_are_refused(llava: tuple[Path, Path], tmp_path: Path) -> None:
    text, projector = llava
    with pytest.raises(ConfigError, match=r"mmproj .* is for a model in a GGUF file"):
        LLM(text.parent, mmproj=str(projector))
    with pytest.raises(ConfigError, match=r"packed_weights .*: mmproj .* is a second file, which is not packed"):
        LLM(text, mmproj=str(projector), packed_weights=str(tmp_path))
    with pytest.raises(ModelError, match="is no GGUF file"):
        LLM(text, mmproj=str(text.parent / "config.json"))
    message = {"role": "user", "content": [{"type": "image", "image": picture(1)}]}
    with LLM(text, num_kv_blocks=64) as llm, pytest.raises(InvalidRequestError, match="files are not served"):
        llm.chat([message], PARAMS, use_tqdm=False)
