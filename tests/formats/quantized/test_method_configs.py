"""Quantization configs: schemes of modules, and refusal of what is not supported, by name."""

from dataclasses import replace

import pytest

from quire.core.errors import ConfigError, ModelError
from quire.formats.quantized.method_configs import quantization_from_config
from quire.formats.quantized.quantized_weights import folder_quantization
from quire.formats.quantized.schemes import StoredQuantization, StoredScheme
from quire.model.quantization import (
    WHOLE_ROW,
    Quantization,
    QuantizationOptions,
    WeightScheme,
    activation_group_size,
)
from support.quantized_folder import (
    TOKEN_INT8,
    awq_config,
    compressed_config,
    compressed_groups,
    fp8_config,
    gptq_config,
)

Q_PROJ, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.11.mlp.down_proj"


def parsed(options: object) -> StoredQuantization:
    found = quantization_from_config({"quantization_config": options}, "here/config.json")
    assert found is not None
    return found


def scheme(options: object, module: str = Q_PROJ) -> StoredScheme:
    found = parsed(options).scheme(module)
    assert found is not None
    return found


def check_refusals(options: dict[str, object], changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        parsed({**options, **changes})
    assert str(caught.value).startswith("here/config.json: quantization_config: ")


def test_config_without_a_quantization_has_none() -> None:
    assert quantization_from_config({"hidden_size": 3, "quantization_config": None}) is None


@pytest.mark.parametrize("options", [{"quant_method": "bitsandbytes"}, {"bits": 4}, {"quant_method": ["gptq"]}])
def test_unknown_methods_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"quantization_config: quant_method (must be one of gptq|is missing)"):
        parsed(options)


def test_gptq_options_make_the_scheme() -> None:
    assert scheme(gptq_config(4, 128)) == StoredScheme("gptq", "int4", 128, zero_offset=1)
    expected = StoredScheme("gptq", "int8", 0, has_zero_points=True, has_input_order=True)
    assert scheme(gptq_config(8, -1, sym=False, desc_act=True, version=2)) == expected
    assert parsed(gptq_config(4, 128)).method == "gptq"


def test_gptq_head_is_dense_unless_the_config_says_otherwise() -> None:
    assert parsed(gptq_config(4, 128)).scheme("lm_head") is None
    assert parsed(gptq_config(4, 128, lm_head=True)).scheme("lm_head") is not None


def test_gptq_rules_of_modules_change_schemes_or_leave_modules_dense() -> None:
    rules = {r"-:.*\.(?:1[0-5])\..*": {}, r"+:.*\.self_attn\..*": {"bits": 8, "group_size": -1}, ".*k": {"sym": False}}
    found = parsed(gptq_config(4, 128, dynamic=rules))
    assert found.scheme(DOWN) is None
    assert found.scheme(Q_PROJ) == StoredScheme("gptq", "int8", 0, zero_offset=1)
    assert found.scheme("model.layers.3.mlp.up_proj") == StoredScheme("gptq", "int4", 128, zero_offset=1)
    assert found.fused_scheme([Q_PROJ, Q_PROJ.replace("q_", "v_")]) == found.scheme(Q_PROJ)
    assert found.fused_scheme([Q_PROJ, "model.layers.3.mlp.up_proj"]) is None


@pytest.mark.parametrize("modules", [["self_attn.q_proj"], [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]])
def test_gptq_modules_that_are_listed_are_the_quantized_ones(modules: list[object]) -> None:
    found = parsed(gptq_config(4, 128, modules_in_block_to_quantize=modules))
    assert found.scheme(Q_PROJ) is not None
    assert found.scheme(DOWN) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, "bits = 3 is not supported; supported are 4, 8"),
        ({"bits": None}, "bits is missing"),
        ({"bits": True}, "bits must be an integer"),
        ({"group_size": 0}, "group_size must be at least 1, or -1 for a whole row, got 0"),
        ({"group_size": -2}, "group_size must be an integer from -1"),
        ({"group_size": 2**17}, "group_size must be an integer from -1 to 65536"),
        ({"sym": "yes"}, "sym must be true or false"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'"),
        ({"checkpoint_format": None, "format": "bitblas"}, "format must be one of gptq, gptq_v2, got 'bitblas'"),
        ({"is_marlin_format": True}, "is_marlin_format = True is not supported"),
        ({"pack_dtype": "int64"}, "pack_dtype = 'int64' is not supported"),
        ({"rotation": "hadamard"}, "unknown option 'rotation' = 'hadamard'; known are bits, group_size"),
        ({"dynamic": []}, "dynamic must be an object"),
        ({"dynamic": {"+:a": 3}}, r"dynamic: \+:a must be an object, got 3"),
        ({"dynamic": {"+:a": {"bits": 2}}}, r"dynamic: \+:a: bits = 2 is not supported"),
        ({"dynamic": {"+:a": {"adapter": "x"}}}, r"dynamic: \+:a: unknown option 'adapter'"),
        ({"dynamic": {"-:(a+)+$": {}}}, r"pattern '\(a\+\)\+\$' is not supported: a repetition within a repetition"),
        ({"dynamic": {f"-:{i}{'x' * 500}": {} for i in range(20)}}, "patterns of 10030 characters; at most 4096"),
        ({"modules_in_block_to_quantize": "all"}, "modules_in_block_to_quantize must be a list of names"),
        ({"modules_in_block_to_quantize": [[3]]}, "must be a list of names, got .3."),
        ({"modules_in_block_to_quantize": ["q"] * 20_000}, "has 20000 names, at most 16384"),
    ],
)
def test_gptq_options_that_are_not_supported_are_refused(changes: dict[str, object], words: str) -> None:
    check_refusals(gptq_config(4, 128), changes, words)


def resolved(options: dict[str, object], **asked: object) -> Quantization:
    return folder_quantization(QuantizationOptions(**asked), parsed(options), "here/config.json")


def test_a_checkpoint_decides_its_quantization() -> None:
    found = resolved(gptq_config(4, 128, sym=False))
    assert (found.method, found.layers) == ("gptq", WeightScheme("int4", 128, 128, "zeros"))
    assert found.head == WeightScheme()
    assert resolved(gptq_config(4, 128), method="gptq").layers.activation_group_size == 128
    assert resolved(gptq_config(4, 32)).layers.activation_group_size == 32
    assert resolved(gptq_config(4, 32), activations="bfloat16").layers.activation_group_size == 0
    assert resolved(gptq_config(8, -1), activations="bfloat16").layers == WeightScheme("int8", WHOLE_ROW)


@pytest.mark.parametrize("method", ["awq", "int4", "none"])
def test_an_option_that_contradicts_the_checkpoint_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization '{method}' contradicts here/config.json: .* says 'gptq'"):
        resolved(gptq_config(4, 128), method=method)


def test_awq_options_make_the_scheme() -> None:
    expected = StoredScheme("awq", "int4", 128, has_zero_points=True)
    assert scheme(awq_config(128)) == expected
    old_names = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert scheme(old_names) == expected
    found = parsed(awq_config(64, modules_to_not_convert=["mlp", "o_proj"]))
    assert found.scheme(DOWN) is None
    assert found.scheme("lm_head") is None
    assert found.scheme(Q_PROJ) == replace(expected, group_size=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8}, "bits = 8 is not supported; supported are 4"),
        ({"zero_point": False}, "zero_point = False is not supported"),
        ({"version": "gemv"}, "version = 'gemv' is not supported: gemm is"),
        ({"version": None, "format": "gemv_fast"}, "format = 'gemv_fast' is not supported"),
        ({"version": 3}, "version = 3 is not supported"),
        ({"checkpoint_format": "gemv"}, "checkpoint_format = 'gemv' is not supported"),
        ({"version": None, "backend": "llm-awq"}, "backend = 'llm-awq' is not supported"),
        ({"desc_act": True}, "desc_act = True is not supported"),
        ({"lm_head": True}, "lm_head = True is not supported"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        ({"modules_to_not_convert": ["x" * 600]}, "has more than 512 characters"),
        ({"group_size": None}, "q_group_size is missing"),
        ({"smooth": 1}, "unknown option 'smooth' = 1"),
    ],
)
def test_awq_options_that_are_not_supported_are_refused(changes: dict[str, object], words: str) -> None:
    check_refusals(awq_config(128), changes, words)


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN_FP8 = {**FLOAT, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (compressed_config(4, 128), StoredScheme("packed", "int4", 128)),
        (compressed_config(8, symmetric=False), StoredScheme("packed", "int8", has_zero_points=True)),
        (compressed_config(4, 128, is_ordered=True), StoredScheme("packed", "int4", 128, has_input_order=True)),
        (
            compressed_config(8, storage="int-quantized", input_activations=TOKEN_INT8),
            StoredScheme("plain", "int8", quantizes_activations=True),
        ),
        (compressed_groups({**FLOAT, "strategy": "tensor"}, "float-quantized"), StoredScheme("plain", "fp8")),
        (
            compressed_groups({**FLOAT, "strategy": "block", "block_structure": "128x64"}, "naive-quantized"),
            StoredScheme("plain", "fp8", 64, 128),
        ),
        (compressed_groups(FLOAT, "float-quantized", input_activations=TOKEN_FP8), StoredScheme("plain", "fp8")),
        (compressed_groups({"group_size": 64, "num_bits": 4}, "pack-quantized"), StoredScheme("packed", "int4", 64)),
    ],
)
def test_compressed_options_make_the_scheme(options: dict[str, object], expected: StoredScheme) -> None:
    assert scheme(options) == expected
    assert parsed(options).scheme("lm_head") is None


def test_compressed_targets_go_by_name_then_pattern_then_class() -> None:
    options = compressed_config(4, 128)
    groups = options["config_groups"]
    for number, (size, targets) in enumerate([(32, ["re:.*self_attn.*"]), (64, [DOWN]), (16, ["re:.*mlp.*"])]):
        groups[f"more_{number}"] = {"targets": targets, "weights": {"num_bits": 4, "group_size": size}}
    groups["none"] = {"targets": ["Attention"]}
    options["ignore"] = ["lm_head", r"re:model\.layers\.0\..*"]
    found = parsed(options)
    schemes = [found.scheme(name) for name in (Q_PROJ, DOWN, "model.layers.3.mlp.up_proj")]
    assert [each.group_size for each in schemes if each is not None] == [32, 64, 16]
    assert found.scheme("model.layers.0.mlp.down_proj") is None
    assert found.scheme("project_in") == StoredScheme("packed", "int4", 128)


def test_tokens_that_share_a_scale_decide_the_activations() -> None:
    token = {"storage": "int-quantized", "input_activations": TOKEN_INT8}
    assert resolved(compressed_config(8, **token)).layers == WeightScheme("int8", WHOLE_ROW, 1 << 16)
    assert resolved(compressed_config(4, 32, **token)).layers == WeightScheme("int4", 32, 32)
    assert resolved(compressed_config(8, **token), activations="bfloat16").layers.activation_group_size == 0
    assert resolved(compressed_config(8)).layers.activation_group_size == activation_group_size(WHOLE_ROW)
    with pytest.raises(ConfigError, match="'int8' is for integer weights, and here/config"):
        resolved(compressed_groups(FLOAT, "float-quantized"), activations="int8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "marlin-24"}, "format must be one of pack-quantized, .* got 'marlin-24'"),
        ({"format": "mixed-precision"}, "config_groups: group_0: format is missing; mixed-precision needs one"),
        ({"quantization_status": "initialized"}, "quantization_status must be one of compressed, frozen"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format = 'sparse-24-bitmask' is not"),
        ({"transform_config": {"config_groups": {}}}, "transform_config = .* is not supported"),
        ({"ignore": "lm_head"}, "ignore must be a list of names"),
        ({"ignore": ["re:(?!a)b"]}, r"pattern '\(\?!a\)b' is not supported: unsupported group"),
        ({"config_groups": ["Linear"]}, "config_groups must be an object"),
        ({"config_groups": {"W8A8": ["Linear"]}}, r"config_groups: W8A8 must be an object, got \['Linear'\]"),
        ({"calibration": 3}, "unknown option 'calibration'"),
    ],
)
def test_compressed_options_that_are_not_supported_are_refused(changes: dict[str, object], words: str) -> None:
    check_refusals(compressed_config(4, 128), changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 9}, "weights: num_bits = 9 is not supported; supported are 2, 3, 4, 5, 6, 7, 8"),
        ({"type": "float"}, "weights: num_bits = 4 is not supported; supported are 8"),
        ({"type": "float", "num_bits": 8}, "type = 'float' is supported without zero points and not packed"),
        ({"type": "complex"}, "type must be one of int, float"),
        ({"strategy": "tensor_group"}, "strategy must be one of tensor, channel, group, block, got 'tensor_group'"),
        ({"strategy": "channel"}, "strategy = 'channel' with group_size = 128"),
        ({"strategy": "block"}, "block_structure is missing"),
        ({"strategy": "block", "block_structure": [128]}, "block_structure must be two sizes"),
        ({"strategy": "block", "block_structure": [0, 1]}, "block_structure: outputs must be an integer from 1"),
        ({"strategy": "block", "block_structure": [9, 9], "symmetric": False}, "symmetric = False .* with blocks"),
        ({"dynamic": True}, "dynamic = True is not supported"),
        ({"actorder": True}, "actorder must be one of weight, static, group, dynamic, got True"),
        ({"rounding": "up"}, "weights: unknown option 'rounding'"),
    ],
)
def test_compressed_weights_that_are_not_supported_are_refused(changes: dict[str, object], words: str) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 128, **changes}
    check_refusals(compressed_groups(weights, "pack-quantized"), {}, words)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"input_activations": {"num_bits": 4}}, "input_activations: num_bits = 4 is not supported; supported are 8"),
        ({"input_activations": {"strategy": "group", "group_size": 8}}, "strategy must be one of token, tensor"),
        ({"input_activations": 8}, "input_activations must be an object"),
        ({"output_activations": {"num_bits": 8}}, "output_activations = .* is not supported"),
        ({"targets": "Linear"}, "targets must be a list of names"),
        ({"format": "marlin-24"}, "group_0: format must be one of"),
        ({"format": "nvfp4-pack-quantized"}, "weights: type is missing"),
        ({"input_activations": {"num_bits": 4, "type": "int"}}, "num_bits = 4 is not supported; supported are 8"),
        ({"weights": 4}, "weights must be an object"),
        ({"scheme": "W4A16"}, "group_0: unknown option 'scheme'"),
    ],
)
def test_compressed_groups_that_are_not_supported_are_refused(group: dict[str, object], words: str) -> None:
    options = compressed_groups({"num_bits": 8}, "int-quantized")
    options["config_groups"]["group_0"] |= group
    check_refusals(options, {}, words)


def test_fp8_options_make_the_scheme() -> None:
    assert scheme(fp8_config((128, 64))) == StoredScheme("plain", "fp8", 64, 128)
    of_autofp8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}
    assert scheme({"quant_method": "fp8", **of_autofp8}) == StoredScheme("plain", "fp8")
    assert parsed(fp8_config()).scheme("lm_head") is None


@pytest.mark.parametrize(
    ("name", "is_dense"),
    [
        ("model.layers.3", True),
        ("model.layers.1", False),
        ("q_proj", True),
        (Q_PROJ, True),
        ("model.layers.*.self_attn", True),
        ("model.layers.3.self", False),
        ("self_attn", False),
    ],
)
def test_fp8_modules_are_named_by_beginnings_at_a_dot_or_ends(name: str, is_dense: bool) -> None:
    found = parsed(fp8_config(modules_to_not_convert=[name]))
    assert (found.scheme(Q_PROJ) is None) == is_dense
    assert found.scheme(DOWN) is not None or name == "model.layers.1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({"weight_block_size": [128, 0]}, "weight_block_size: inputs must be an integer from 1 to 65536, got 0"),
        ({"weight_block_size": 128}, "weight_block_size must be two sizes"),
        ({"activation_scheme": "token"}, "activation_scheme must be one of dynamic, static"),
        ({"fmt": "e5m2"}, "fmt must be one of e4m3, float8_e4m3fn, got 'e5m2'"),
        ({"scale_fmt": "mx"}, "scale_fmt must be one of float, ue8m0"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert = .* is not supported"),
        ({"ignored_layers": {"a": 1}}, "ignored_layers must be a list of names"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4' is not supported"),
        ({"store_dtype": "fp8"}, "unknown option 'store_dtype' = 'fp8'"),
    ],
)
def test_fp8_options_that_are_not_supported_are_refused(changes: dict[str, object], words: str) -> None:
    check_refusals(fp8_config(), changes, words)


INT8_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
AS_WRITTEN: dict[str, tuple[dict[str, object], StoredScheme]] = {
    "Transformers, GPTQ": (
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
         "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "tokenizer": None,
         "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
         "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True,
         "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
        StoredScheme("gptq", "int4", 128, zero_offset=1),
    ),
    "AutoGPTQ": (
        {"bits": 8, "group_size": 32, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": False,
         "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
         "checkpoint_format": "gptq", "is_marlin_format": False},
        StoredScheme("gptq", "int8", 32, has_zero_points=True, zero_offset=1, has_input_order=True),
    ),
    "GPTQModel": (
        {"bits": 4, "checkpoint_format": "gptq", "desc_act": False, "format": "gptq", "group_size": 128,
         "lm_head": False, "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05, "hessian": {}},
         "method": "gptq", "pack_dtype": "int32", "quant_method": "gptq", "sym": True},
        StoredScheme("gptq", "int4", 128, zero_offset=1),
    ),
    "AutoAWQ": (
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
         "zero_point": True},
        StoredScheme("awq", "int4", 128, has_zero_points=True),
    ),
    "GPTQModel, AWQ": (
        {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "quant_method": "awq", "method": "awq",
         "format": "gemm", "checkpoint_format": "gemm", "version": "gemm", "zero_point": True, "pack_dtype": "int32",
         "meta": {"quantizer": ["gptqmodel:7.7.0"]}},
        StoredScheme("awq", "int4", 128, has_zero_points=True),
    ),
    "LLM Compressor, W8A8 of 2024": (
        {"config_groups": {"group_0": {
            "input_activations": INT8_STATIC, "output_activations": None, "targets": ["Linear"],
            "weights": {**INT8_STATIC, "strategy": "channel", "group_size": None, "actorder": None,
                        "block_structure": None, "observer": "mse", "observer_kwargs": {}}}},
         "format": "int-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head"], "kv_cache_scheme": None,
         "quant_method": "compressed-tensors", "quantization_status": "frozen",
         "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": [],
                             "registry_requires_subclass": False, "sparsity_structure": "unstructured"}},
        StoredScheme("plain", "int8", quantizes_activations=True),
    ),
    "Hugging Face, FP8": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
         "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"], "weight_block_size": [128, 128]},
        StoredScheme("plain", "fp8", 128, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", AS_WRITTEN)
def test_configs_are_read_as_tools_write_them(tool: str) -> None:
    options, expected = AS_WRITTEN[tool]
    assert scheme(options) == expected
    assert parsed(options).scheme("lm_head") is None
