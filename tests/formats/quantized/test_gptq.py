"""GPTQ checkpoints: what is read equals the values that the format defines, whole, in parts and fused."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire.core.errors import ModelError
from support.quantized_folder import INNER, WIDTH, Pair, change_tensor, gptq, gptq_config, write_pair
from support.quantized_reading import misread, read, values

KINDS = [
    {"bits": 4, "group_size": 32},
    {"bits": 4, "group_size": 16, "sym": False},
    {"bits": 4, "group_size": 32, "sym": False, "version": 2},
    {"bits": 4, "group_size": 128},
    {"bits": 8, "group_size": -1},
    {"bits": 8, "group_size": 32, "sym": False},
    {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    {"bits": 8, "group_size": 32, "desc_act": True, "version": 2},
]
DOWN = "model.layers.1.mlp.down_proj"


def write(folder: Path, **kind: int) -> Pair:
    return write_pair(folder, gptq(**kind), gptq_config(**kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_those_of_the_definition(tmp_path: Path, kind: dict[str, int]) -> None:
    pair = write(tmp_path, **kind)
    assert misread(pair, f"int{kind['bits']}") == []


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5], KINDS[6]], ids=str)
@pytest.mark.parametrize("cuts", [[], [48], [16, 80]], ids=["one part", "two", "three"])
def test_parts_are_rows_of_the_whole(tmp_path: Path, kind: dict[str, int], cuts: list[int]) -> None:
    pair = write(tmp_path, **kind)
    name = DOWN.replace("down", "up")
    parts = [read(pair.folder, (name, INNER), width=WIDTH, rows=[ends]) for ends in pairwise([0, *cuts, INNER])]
    assert torch.equal(torch.cat([values(part) for part in parts]), pair.values[name])
    assert {type(part.zero_points) for part in parts} == {torch.Tensor}


def test_fused_modules_are_one_weight(tmp_path: Path) -> None:
    pair = write(tmp_path, **KINDS[6])
    stem = "model.layers.0.self_attn."
    modules = [(f"{stem}{name}", num_rows) for name, num_rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))]
    weight = read(pair.folder, *modules, width=WIDTH)
    assert (weight.format, weight.out_features, len(weight.data)) == ("int4", 128, 3)
    assert weight.group_index is not None
    assert torch.equal(values(weight), torch.cat([pair.values[name] for name, _ in modules]))


def test_symmetric_weights_have_one_zero_point(tmp_path: Path) -> None:
    pair = write(tmp_path, **KINDS[0])
    assert read(pair.folder, (DOWN, WIDTH), width=INNER).zero_points == 8


def test_consecutive_groups_have_no_index(tmp_path: Path) -> None:
    pair = write(tmp_path, **KINDS[0], desc_act=False)
    assert read(pair.folder, (DOWN, WIDTH), width=INNER).group_index is None


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("qweight", lambda t: t[1:], r"has shape \[12, 64\], expected \[13, 64\]"),
        ("qweight", lambda t: t.float(), "has dtype F32, expected one of I32"),
        ("qzeros", lambda t: t.flatten(), r"has shape \[32\], expected \[4, 8\]"),
        ("scales", lambda t: t.index_fill(0, torch.tensor([1]), torch.inf), r"has scales that are NaN or greater than"),
        ("scales", lambda t: t.float() * 1e35, r"has scales that are NaN or greater than 1e\+30"),
        ("scales", lambda t: t.int(), "has dtype I32, expected one of F64, F32"),
        ("g_idx", lambda t: t + 1, "does not divide 104 inputs into 4 groups of 32, the last for the rest"),
        ("g_idx", lambda t: t * 0, "does not divide 104 inputs into 4 groups"),
        ("g_idx", lambda t: t[:-1], r"has shape \[103\], expected \[104\]"),
        ("g_idx", None, "is missing"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str
) -> None:
    pair = write(tmp_path, **KINDS[6])
    change_tensor(pair.folder, f"{DOWN}.{tensor}", change)
    with pytest.raises(ModelError, match=f"tensor {DOWN}.{tensor} {words}"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)


def test_outputs_that_do_not_fill_words_are_refused(tmp_path: Path) -> None:
    pair = write(tmp_path, **KINDS[0])
    with pytest.raises(ModelError, match=r"qweight packs 8 elements per word, \[60, 104\] do not divide"):
        read(pair.folder, (DOWN, 60), width=INNER)
