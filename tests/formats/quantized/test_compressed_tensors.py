"""Checkpoints of compressed-tensors: what is read equals the values that the format defines, and the library's own."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    float_codes,
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
    {"bits": 2, "group_size": 32},
    {"bits": 3, "group_size": 32, "symmetric": False},
    {"bits": 5, "group_size": 32},
    {"bits": 6, "symmetric": False},
    {"bits": 7, "group_size": 32, "symmetric": False, "is_ordered": True},
    {"bits": 6, "storage": "int-quantized", "symmetric": False},
]
SMALL_FLOATS = {  # num_bits, group_size, strategy, and the format that is read
    "nvfp4-pack-quantized": (4, 16, "tensor_group", "codebook4"), "mxfp4-pack-quantized": (4, 32, "group", "codebook4"),
    "mxfp6-pack-quantized": (6, 32, "group", "fp8"), "mxfp8-quantized": (8, 32, "group", "fp8"),
}  # fmt: skip
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def write(folder: Path, **kind: object) -> Pair:
    return write_pair(folder, compressed(**kind), compressed_config(**kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_those_of_the_definition(tmp_path: Path, kind: dict[str, object]) -> None:
    pair = write(tmp_path, **kind)
    assert misread(pair, "int4" if int(str(kind["bits"])) <= 4 else "int8") == []


def write_small_floats(folder: Path, storage: str) -> Pair:
    num_bits, group_size, strategy, _ = SMALL_FLOATS[storage]
    weights = {"num_bits": num_bits, "group_size": group_size, "strategy": strategy, "type": "float"}
    return write_pair(folder, float_codes(storage), compressed_groups(weights, storage))


@pytest.mark.parametrize("storage", SMALL_FLOATS)
def test_values_of_small_floats_are_those_of_the_definition(tmp_path: Path, storage: str) -> None:
    pair = write_small_floats(tmp_path, storage)
    name = "model.layers.1.self_attn.o_proj"
    assert misread(pair, SMALL_FLOATS[storage][-1]) == []
    parts = [read(pair.folder, (name, WIDTH), width=WIDTH, rows=[ends]) for ends in ((0, 24), (24, WIDTH))]
    assert torch.equal(torch.cat([values(part) for part in parts]), pair.values[name])


@pytest.mark.parametrize(
    ("storage", "tensor", "change", "words"),
    [
        ("nvfp4-pack-quantized", "weight_global_scale", None, "is missing"),
        ("nvfp4-pack-quantized", "weight_global_scale", lambda t: t * 0, "has scales that are NaN or greater"),
        ("nvfp4-pack-quantized", "weight_packed", lambda t: t[:, 1:], r"has shape \[64, 31\], expected \[64, 32\]"),
        ("mxfp6-pack-quantized", "weight_packed", lambda t: t.int(), "has dtype I32, expected one of U8"),
        ("mxfp4-pack-quantized", "weight_scale", lambda t: t * 0 + 255, "has an exponent of 255, the limit is 223"),
        ("mxfp8-quantized", "weight_scale", lambda t: t.float(), "has dtype F32, expected one of U8"),
    ],
)
def test_bad_tensors_of_small_floats_are_named(
    tmp_path: Path, storage: str, tensor: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str
) -> None:
    pair = write_small_floats(tmp_path, storage)
    name = "model.layers.1.self_attn.o_proj"
    change_tensor(pair.folder, f"{name}.{tensor}", change)
    with pytest.raises(ModelError, match=f"tensor {name}.weight_.*{words}"):
        read(pair.folder, (name, WIDTH), width=WIDTH)


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


PRESETS = {  # all of compressed-tensors 0.20.1, with what is read of them; None: what an error says
    "UNQUANTIZED": "dense", "W4A16_ASYM": "int4", "W8A8": "int8", "INT8": "int8", "W4AFP8": "int4", "FP8": "fp8",
    "FP8_DYNAMIC": "fp8", "FP8_BLOCK": "fp8", "NVFP4A16": "codebook4", "NVFP4": "codebook4", "MXFP4A16": "codebook4",
    "MXFP4": "codebook4", "MXFP4XFP8": "codebook4", "MXFP6A16": "fp8", "MXFP6A8": "fp8", "MXFP8A16": "fp8",
    "MXFP8": "fp8", "W2A4": None, "W2A8": "int4", "W2A16": "int4", "W3A4": None, "W3A8": "int4", "W3A16": "int4",
    "W4A4": None, "W4A8": "int4", "W4A16": "int4", "W5A8": "int8", "W5A16": "int8", "W6A8": "int8", "W6A16": "int8",
    "W7A8": "int8", "W7A16": "int8", "W8A16": "int8",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_preset_of_the_library_has_its_values_or_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme

    found = {}
    for name in PRESET_SCHEMES:
        scheme = preset_name_to_scheme(name, ["Linear"])
        expected = write_with_library(tmp_path, {"group_0": scheme}, 192, 256)
        if name in PRESETS and PRESETS[name] is None:
            with pytest.raises(ModelError, match="input_activations: num_bits = 4 is not supported; supported are 8"):
                read(tmp_path, ("a", 192), width=256)
            found[name] = None
            continue
        weight = read(tmp_path, ("a", 192), width=256)
        found[name] = weight.format
        torch.testing.assert_close(values(weight), expected, rtol=2**-7, atol=0, msg=name)  # scales are bfloat16 there
    assert found == {name: PRESETS.get(name, "not in the table") for name in PRESET_SCHEMES}


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
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    expected = write_with_library(tmp_path, {"group_0": {"targets": ["Linear"], "weights": weights}}, 48, 96, storage)
    assert torch.equal(values(read(tmp_path, ("a", 48), width=96)), expected)


def write_with_library(
    folder: Path, groups: dict[str, Any], num_rows: int, width: int, storage: str | None = None
) -> torch.Tensor:
    """Write a folder with one linear layer, a, as the library does; return the values that it reads, float32.

    storage: the format's name; None: that which the library infers.
    """
    import compressed_tensors
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    torch.manual_seed(0)
    config = QuantizationConfig(config_groups=groups, format=storage or "dense", quantization_status="initialized")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(width, num_rows, bias=False)})
    apply_quantization_config(model, config, show_progress=False)
    module = model["a"]
    if module.quantization_scheme.weights is not None:
        storage = storage or infer_module_format(type(module), module.quantization_scheme).value
        _set_scales(module)
        compress_module(module, format=storage)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    options = {**config.model_dump(mode="json"), "quantization_status": "compressed", "format": storage or "dense"}
    options["version"] = compressed_tensors.__version__
    (folder / "config.json").write_text(json.dumps({"quantization_config": options}))
    if module.quantization_scheme.weights is not None:
        decompress_module(module, format=storage)
    weight: torch.Tensor = module.weight.detach()
    return weight.float()


def _set_scales(module: Any) -> None:  # noqa: ANN401 (a module with attributes of the library)
    """Set the scales of a module by its weight's values."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = module.quantization_scheme.weights
    blocks, scale_of_all = _blocks(module.weight.detach(), args.model_dump()), None
    if args.strategy == "tensor_group":
        scale_of_all = generate_gparam(module.weight.detach().amin(), module.weight.detach().amax())
        module.weight_global_scale.data.copy_(scale_of_all)
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=scale_of_all)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_scale.shape))


def _blocks(weight: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """Return the weight's values with those that share a scale in the last dimension."""
    if weights["strategy"] == "tensor":
        return weight.flatten()[None]
    if weights["strategy"] == "block":
        rows, inputs = weights["block_structure"]
        rows, inputs = min(rows, len(weight)), min(inputs, weight.shape[1])
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % inputs, 0, -len(weight) % rows))
        return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, inputs)).transpose(1, 2).flatten(2)
    grouped = weights["strategy"] in ("group", "tensor_group")
    return weight.unflatten(1, (-1, weights["group_size"])) if grouped else weight[:, None]
