"""FP8 checkpoints: what is read equals the values that the format defines, whole and in parts."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.errors import ModelError
from quire.engine.formats import read_source
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from support.quantized_folder import INNER, WIDTH, Pair, Quantize, e4m3, fp8, fp8_config, write_pair
from support.quantized_reading import misread, read, values

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
KINDS: dict[str, tuple[Quantize, dict[str, object]]] = {
    "tensor": (fp8(kind="tensor"), fp8_config()),
    "scalar": (fp8(kind="scalar", name="weight_scale_inv"), fp8_config()),
    "channel": (fp8(scale_dtype=torch.bfloat16), fp8_config()),
    "flat channel": (fp8(kind="flat"), fp8_config()),
    "blocks": (fp8((32, 48), name="weight_scale_inv"), fp8_config((32, 48))),
    "large blocks": (fp8((128, 128), name="weight_scale_inv"), fp8_config((128, 128))),
}


def write(folder: Path, kind: str) -> Pair:
    return write_pair(folder, *KINDS[kind])


def test_elements_are_those_of_the_dtype() -> None:
    elements, numbers = e4m3(np.random.default_rng(0), 50, 50)
    assert torch.equal(elements.float(), numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_definition(tmp_path: Path, kind: str) -> None:
    pair = write(tmp_path, kind)
    assert misread(pair, "fp8") == []


@pytest.mark.parametrize("kind", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("cuts", [[], [48], [16, 80]], ids=["one part", "two", "three"])
def test_parts_are_rows_of_the_whole(tmp_path: Path, kind: str, cuts: list[int]) -> None:
    pair = write(tmp_path, kind)
    parts = [read(pair.folder, (UP, INNER), width=WIDTH, rows=[ends]) for ends in pairwise([0, *cuts, INNER])]
    assert torch.equal(torch.cat([values(part) for part in parts]), pair.values[UP])


def test_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    pair = write(tmp_path, "blocks")
    tensors = load_file(pair.folder / "model.safetensors")
    exponents = torch.arange(110, 118, dtype=torch.uint8).view(2, 4)[:, :3].contiguous()
    tensors[f"{DOWN}.weight_scale_inv"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, pair.folder / "model.safetensors")
    scales = torch.pow(2.0, exponents.double() - 127).float()[torch.arange(WIDTH) // 32][:, torch.arange(INNER) // 48]
    expected = scales * tensors[f"{DOWN}.weight"].float()
    assert torch.equal(values(read(pair.folder, (DOWN, WIDTH), width=INNER)), expected)


def test_layers_that_are_ignored_stay_dense(tmp_path: Path) -> None:
    kinds = {end: fp8() for end in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")}
    pair = write_pair(tmp_path, kinds, fp8_config(modules_to_not_convert=["gate_proj", "up_proj", "lm_head"]))
    assert read(pair.folder, (UP, INNER), width=WIDTH).format == "dense"
    load_model(read_source(pair.folder), back_end=TORCH)


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("weight", lambda t: t.view(torch.uint8), "has dtype U8, expected one of F8_E4M3"),
        ("weight", lambda t: t.float().to(torch.float8_e5m2), "has dtype F8_E5M2, expected one of F8_E4M3"),
        ("weight", lambda t: t[:, :-1], r"has shape \[64, 103\], expected \[64, 104\]"),
        ("weight_scale_inv", lambda t: t[:1], r"has shape \[1, 3\], expected \[2, 3\]"),
        ("weight_scale_inv", lambda t: t / 0, r"has scales that are NaN or greater than 1e\+30"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    pair = write(tmp_path, "blocks")
    tensors = load_file(pair.folder / "model.safetensors")
    tensors[f"{DOWN}.{tensor}"] = change(tensors[f"{DOWN}.{tensor}"]).contiguous()
    save_file(tensors, pair.folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {DOWN}.{tensor} {words}"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)


def test_a_weight_without_scales_is_refused_by_the_name_of_the_scales(tmp_path: Path) -> None:
    pair = write(tmp_path, "blocks")
    tensors = load_file(pair.folder / "model.safetensors")
    del tensors[f"{DOWN}.weight_scale_inv"]
    save_file(tensors, pair.folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {DOWN}.weight_scale is missing"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)
