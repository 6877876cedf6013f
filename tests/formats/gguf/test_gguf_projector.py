"""Encoders of images in files of their own: the answers of the folder that they were made from, and clear errors."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.engine.formats import read_source
from quire.engine.loading import load
from quire.engine.options import EngineOptions
from quire.formats.gguf.gguf_file import GGUFFile, MetadataArray
from quire.kernels.choice import choose_back_end
from quire.model.loader import load_model
from support.gguf_files import Stored, as_is, convert, tokenizer_metadata, write_gguf, write_with_projector
from support.small_vision import NUM_TOKENS, write_gemma3, write_llava

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

FAMILIES: dict[str, Callable[[Path], Path]] = {"llava": write_llava, "gemma3": write_gemma3}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_with_projector(folder, tmp_path_factory.mktemp("files"))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


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


def test_answers_are_those_of_the_folder(folder: Path, files: tuple[Path, Path]) -> None:
    text, projector = files
    expected, found = answers(folder), answers(text, mmproj=str(projector))
    assert found[0][0] != found[1][0] or found[0][1:] != found[1][1:]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:2] == theirs[:2]
        np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=1e-5)


def is_half(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and "position" not in name


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
        side = tower.spec.image_size
        pixels = np.random.default_rng(0).standard_normal((3, side, side), np.float32)
        found.append(np.asarray(tower.encode(pixels)).copy())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)


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
        ({"clip.projector_type": "ldp"}, "", r"clip.projector_type must be one of mlp, gemma3, got 'ldp'"),
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
