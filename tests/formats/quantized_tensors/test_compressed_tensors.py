"""Checkpoints of compressed-tensors: what is read equals the values that the format defines, and the library's own."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.errors import ModelError
from support.quantized_folder import (
    INNER,
    WIDTH,
    Pair,
    change_tensor,
    compressed,
    compressed_config,
    compressed_groups,
    fp8,
    write_pair,
)
from support.quantized_reading import misread, read, values

KINDS: list[dict[str, object]] = [
    {"bits": 4, "group_size": 32},
    {"bits": 4, "group_size": 32, "symmetric": False},
    {"bits": 4, "group_size": 32, "symmetric": False, "is_ordered": True},
    {"bits": 4},
    {"bits": 8, "group_size": 32},
    {"bits": 8, "symmetric": False},
    {"bits": 8, "storage": "int-quantized"},
    {"bits": 8, "storage": "int-quantized", "symmetric": False},
    {"bits": 8, "storage": "int-quantized", "strategy": "tensor"},
    {"bits": 4, "storage": "int-quantized", "group_size": 32, "symmetric": False},
    {"bits": 8, "storage": "naive-quantized"},
]
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def write(folder: Path, **kind: object) -> Pair:
    return write_pair(folder, compressed(**kind), compressed_config(**kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_those_of_the_definition(tmp_path: Path, kind: dict[str, object]) -> None:
    pair = write(tmp_path, **kind)
    assert misread(pair, f"int{kind['bits']}") == []


@pytest.mark.parametrize(
    ("quantize", "weights"),
    [
        (fp8(kind="tensor"), {"strategy": "tensor"}),
        (fp8(kind="channel", scale_dtype=torch.bfloat16), {"strategy": "channel"}),
        (fp8((48, 32)), {"strategy": "block", "block_structure": [48, 32]}),
        (fp8((1, 32)), {"strategy": "group", "group_size": 32}),
    ],
    ids=["tensor", "channel", "block", "group"],
)
def test_float_values_are_those_of_the_definition(
    tmp_path: Path, quantize: Callable[..., object], weights: dict[str, object]
) -> None:
    pair = write_pair(tmp_path, quantize, compressed_groups({**FLOAT, **weights}, "float-quantized"))
    assert misread(pair, "fp8") == []


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[5], KINDS[7], KINDS[9]], ids=str)
@pytest.mark.parametrize("cuts", [[], [48], [16, 80]], ids=["one part", "two", "three"])
def test_parts_are_rows_of_the_whole(tmp_path: Path, kind: dict[str, object], cuts: list[int]) -> None:
    pair = write(tmp_path, **kind)
    parts = [read(pair.folder, (UP, INNER), width=WIDTH, rows=[ends]) for ends in pairwise([0, *cuts, INNER])]
    assert torch.equal(torch.cat([values(part) for part in parts]), pair.values[UP])


@pytest.mark.parametrize(("num_rows", "width"), [(5, 7), (13, 33), (3, 100)])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_do_not_fill_words_are_read(tmp_path: Path, bits: int, num_rows: int, width: int) -> None:
    import numpy as np

    module = compressed(bits, 32, symmetric=False)(np.random.default_rng(0), num_rows, width)
    save_file({f"a.{end}": t.contiguous() for end, t in module.tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": compressed_config(bits, 32, symmetric=False)})
    )
    assert torch.equal(values(read(tmp_path, ("a", num_rows), width=width)), module.values)


def test_groups_of_modules_have_formats_of_their_own(tmp_path: Path) -> None:
    config = compressed_config(4, 32)
    eight = compressed_config(8, storage="int-quantized")["config_groups"]["group_0"]
    eight |= {"targets": [r"re:.*\.down_proj", "model.layers.0.self_attn.o_proj"], "format": "int-quantized"}
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    config["config_groups"]["group_1"] = eight
    config["format"], config["ignore"] = "mixed-precision", ["lm_head", "re:.*k_proj"]
    kinds = {end: compressed(4, 32) for end in ("q_proj", "v_proj", "gate_proj", "up_proj")}
    kinds["down_proj"] = compressed(8, storage="int-quantized")
    pair = write_pair(tmp_path, kinds, config)
    assert read(pair.folder, (DOWN, WIDTH), width=INNER).format == "int8"
    assert read(pair.folder, (UP, INNER), width=WIDTH).format == "int4"
    assert read(pair.folder, ("model.layers.1.self_attn.k_proj", 32), width=WIDTH).format == "dense"
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.o_proj\.weight_shape is missing"):
        read(pair.folder, ("model.layers.1.self_attn.o_proj", WIDTH), width=WIDTH)


@pytest.mark.parametrize(
    ("kind", "tensor", "change", "words"),
    [
        (2, "weight_packed", lambda t: t[:, 1:], r"has shape \[64, 12\], expected \[64, 13\]"),
        (2, "weight_packed", lambda t: t.long(), "has dtype I64, expected one of I32"),
        (2, "weight_shape", lambda t: t + 1, r"is \[65, 105\], expected \[64, 104\]"),
        (2, "weight_shape", lambda t: t.float(), "has dtype F32, expected one of I64, I32"),
        (2, "weight_zero_point", None, "is missing"),
        (2, "weight_zero_point", lambda t: t.flatten(), r"has shape \[32\], expected \[8, 4\]"),
        (2, "weight_g_idx", lambda t: t // 2, "does not divide 104 inputs into 4 groups of 32"),
        (2, "weight_scale", lambda t: t[:, :1], r"has shape \[64, 1\], expected \[64, 4\]"),
        (6, "weight_scale", lambda t: t * torch.inf, "has scales that are NaN or greater"),
        (6, "weight_scale", lambda t: t[:3], r"has shape \[3, 1\], expected \[64, 1\]"),
        (6, "weight", lambda t: t.short(), "has dtype I16, expected one of I8"),
        (9, "weight", lambda t: t + 1, "has elements from -7 to 8, expected -8 to 7"),
        (9, "weight_zero_point", lambda t: t - 2, "has elements from -10 to 5, expected -8 to 7"),
    ],
)
def test_bad_tensors_are_named(
    tmp_path: Path, kind: int, tensor: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str
) -> None:
    pair = write(tmp_path, **KINDS[kind])
    change_tensor(pair.folder, f"{DOWN}.{tensor}", change)
    with pytest.raises(ModelError, match=f"tensor {DOWN}.{tensor} {words}"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)


def test_a_float_weight_with_nan_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, fp8(), compressed_groups({**FLOAT, "strategy": "channel"}, "float-quantized"))
    tensors = load_file(pair.folder / "model.safetensors")
    tensors[f"{DOWN}.weight"].view(torch.uint8)[5, 3] = 0xFF
    save_file(tensors, pair.folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {DOWN}.weight has values that are NaN"):
        read(pair.folder, (DOWN, WIDTH), width=INNER)


def test_an_index_of_minus_one_is_none(tmp_path: Path) -> None:
    pair = write(tmp_path, **KINDS[0])
    tensors = load_file(pair.folder / "model.safetensors")
    tensors[f"{DOWN}.weight_g_idx"] = torch.full((INNER,), -1, dtype=torch.int32)
    save_file(tensors, pair.folder / "model.safetensors")
    assert read(pair.folder, (DOWN, WIDTH), width=INNER).group_index is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("storage", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    ],
    ids=str,
)
def test_values_are_those_of_the_library(tmp_path: Path, storage: str, weights: dict[str, object]) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = QuantizationConfig(config_groups=groups, format=storage, quantization_status="initialized")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(96, 48, bias=False)})
    apply_quantization_config(model, config, show_progress=False)
    module = model["a"]
    blocks = _blocks(module.weight.detach(), weights)
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), module.quantization_scheme.weights)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    module.weight_zero_point.data.copy_(zeros.reshape(module.weight_scale.shape))
    compress_module(module, format=storage)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    options = {**config.model_dump(mode="json"), "quantization_status": "compressed", "version": library.__version__}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": options}))
    decompress_module(module, format=storage)
    assert torch.equal(values(read(tmp_path, ("a", 48), width=96)), module.weight.detach())


def _blocks(weight: torch.Tensor, weights: dict[str, object]) -> torch.Tensor:
    """Return the weight's values with those that share a scale in the last dimension."""
    if weights["strategy"] == "tensor":
        return weight.flatten()[None]
    if weights["strategy"] == "block":
        return weight.view(3, 16, 3, 32).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, 32)) if weights["strategy"] == "group" else weight[:, None]
