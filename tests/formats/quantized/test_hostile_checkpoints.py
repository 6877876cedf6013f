"""Quantized folders from hostile hands: each loads and runs, or ends in a ModelError that names the folder."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.formats import read_source
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from support.fuzz_seeds import fuzz
from support.hostile_models import is_refused
from support.quantized_folder import (
    TOKEN_INT8,
    Pair,
    awq,
    awq_config,
    compressed,
    compressed_config,
    compressed_groups,
    float_codes,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    write_pair,
)
from support.spoilt_checkpoint import spoil

TOKENS = [5, 6, 7]

WRITERS: dict[str, Callable[[Path], Pair]] = {
    "gptq": lambda parent: write_pair(parent, gptq(4, 64, sym=False, desc_act=True),
                                      gptq_config(4, 64, sym=False, desc_act=True, dynamic={"-:.*x_proj": {}})),
    "awq": lambda parent: write_pair(parent, awq(32), awq_config(32, modules_to_not_convert=["x_proj"])),
    "packed": lambda parent: write_pair(
        parent, compressed(4, 32, symmetric=False, is_ordered=True),
        {**compressed_config(4, 32, symmetric=False, is_ordered=True), "ignore": ["lm_head", "re:.*x_proj"]}),
    "bytes": lambda parent: write_pair(
        parent, compressed(8, storage="int-quantized", symmetric=False),
        compressed_config(8, storage="int-quantized", symmetric=False, input_activations=TOKEN_INT8)),
    "NVFP4": lambda parent: write_pair(
        parent, float_codes("nvfp4-pack-quantized"),
        compressed_groups({"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"},
                          "nvfp4-pack-quantized") | {"ignore": ["lm_head", "re:.*x_proj"]}),
    "fp8": lambda parent: write_pair(
        parent, fp8((32, 48), name="weight_scale_inv"),
        fp8_config((32, 48), modules_to_not_convert=["lm_head", "model.layers.*.x_proj"])),
}  # fmt: skip


def run_spoilt(whole: Path, seed: int, paged_runner: type) -> bool:
    """Return whether a spoilt copy of a folder was refused."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(whole, Path(parent) / "model"))
        done = spoil(folder, random.Random(seed))

        def use() -> None:
            paged_runner(load_model(read_source(folder), back_end=TORCH)).step({"a": TOKENS})

        return is_refused(use, folder, f"seed {seed}: {done}")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_spoilt_folder_runs_or_is_refused_by_name(tmp_path: Path, paged_runner: type, kind: str) -> None:
    folder = WRITERS[kind](tmp_path).folder
    refused = [run_spoilt(folder, seed, paged_runner) for seed in range(50)]
    assert sum(refused) > 20


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", WRITERS)
def test_many_spoilt_folders(tmp_path: Path, paged_runner: type, kind: str) -> None:
    folder, refused = WRITERS[kind](tmp_path).folder, list[bool]()
    fuzz(lambda seed: refused.extend(run_spoilt(folder, 500 * seed + i, paged_runner) for i in range(500)), 1000)
    assert sum(refused) > len(refused) // 3
