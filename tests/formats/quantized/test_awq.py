"""AWQ checkpoints: what is read equals the values that the format defines, whole and in parts."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire.core.errors import ModelError
from quire.engine.formats import read_source
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from support.quantized_folder import INNER, LAYER_LINEARS, WIDTH, awq, awq_config, change_tensor, write_pair
from support.quantized_reading import misread, read, values

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def test_the_order_in_a_word_is_that_of_the_definition() -> None:
    assert awq(8)(DigitsOnly(), 8, 1).tensors["qweight"].tolist() == [[0x75316420]]


class DigitsOnly:
    """Weights are the number of their output, in place of random numbers."""

    def integers(self, low: int, high: int, shape: tuple[int, int]) -> object:
        return torch.arange(shape[0])[:, None].expand(shape).numpy()

    def random(self, shape: tuple[int, int]) -> object:
        return torch.ones(shape).numpy()


@pytest.mark.parametrize("group_size", [16, 32, 128, -1])
def test_values_are_those_of_the_definition(tmp_path: Path, group_size: int) -> None:
    pair = write_pair(tmp_path, awq(group_size), awq_config(group_size))
    assert misread(pair, "int4") == []


@pytest.mark.parametrize("cuts", [[], [48], [16, 80]], ids=["one part", "two", "three"])
def test_parts_are_rows_of_the_whole(tmp_path: Path, cuts: list[int]) -> None:
    pair = write_pair(tmp_path, awq(32), awq_config(32))
    parts = [read(pair.folder, (UP, INNER), width=WIDTH, rows=[ends]) for ends in pairwise([0, *cuts, INNER])]
    assert torch.equal(torch.cat([values(part) for part in parts]), pair.values[UP])


def test_modules_not_converted_stay_dense(tmp_path: Path) -> None:
    kinds = {name.rpartition(".")[2]: awq(32) for name in LAYER_LINEARS if "self_attn" in name}
    pair = write_pair(tmp_path, kinds, awq_config(32, modules_to_not_convert=["mlp"]))
    assert read(pair.folder, (DOWN, WIDTH), width=INNER).format == "dense"
    load_model(read_source(pair.folder), back_end=TORCH)


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("qweight", lambda t: t[:, 1:], r"has shape \[104, 7\], expected \[104, 8\]"),
        ("qweight", None, "is missing"),
        ("qzeros", lambda t: t.short(), "has dtype I16, expected one of I32"),
        ("scales", lambda t: t * torch.nan, "has scales that are NaN"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str
) -> None:
    pair = write_pair(tmp_path, awq(32), awq_config(32))
    change_tensor(pair.folder, f"{DOWN}.{tensor}", change)
    with pytest.raises(ModelError, match=f"tensor {DOWN}.{tensor} {words}"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)


def test_outputs_that_do_not_fill_words_are_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, awq(32), awq_config(32))
    with pytest.raises(ModelError, match="qweight packs 8 outputs per word, 60 do not divide"):
        read(pair.folder, (DOWN, 60), width=INNER)
