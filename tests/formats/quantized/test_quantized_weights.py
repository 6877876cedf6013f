"""Models with quantized weights: layers of several formats, dense modules, and the bits of the dequantized twin."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.engine.formats import read_source
from quire.engine.parallel.rank_messages import MemoryLayout
from quire.kernels.back_end import BackEnd
from quire.kernels.reference.back_ends import TORCH
from quire.kernels.reference.linear import reference
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from quire.model.quantization import Activations, QuantizationOptions
from quire.model.sharding import Ranks
from quire_lab.sim.footprint import weight_bytes
from support.on_tensors import linear_of
from support.pairwise import covering
from support.quantized_folder import (
    INNER,
    KV_WIDTH,
    LAYER_LINEARS,
    TOKEN_INT8,
    WIDTH,
    Quantize,
    awq,
    awq_config,
    compressed,
    compressed_config,
    compressed_groups,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    write_pair,
)
from support.quantized_reading import read, values
from support.thread_ranks import RankDecoder, assert_ranks_have_the_bits_of_one, logits_of_ranks, make_ranks

TOKENS = list(range(1, 40))
ENDS = [name.rpartition(".")[2] for name in LAYER_LINEARS]
QKV = {"q_proj": WIDTH, "k_proj": KV_WIDTH, "v_proj": KV_WIDTH}


BYTES = "int-quantized"
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
ORDERED = {"bits": 4, "group_size": 32, "sym": False, "desc_act": True}
KINDS: dict[str, tuple[Quantize, dict[str, object], bool]] = {
    "gptq": (gptq(**ORDERED), gptq_config(**ORDERED), False),
    "gptq, its head too": (gptq(8, -1), gptq_config(8, -1, lm_head=True), True),
    "awq": (awq(32), awq_config(32), False),
    "packed": (compressed(4, 32, symmetric=False), compressed_config(4, 32, symmetric=False), False),
    "packed, its head too": (compressed(8), {**compressed_config(8), "ignore": []}, True),
    "bytes": (compressed(8, storage=BYTES), compressed_config(8, storage=BYTES, input_activations=TOKEN_INT8), False),
    "fp8": (fp8((128, 128), name="weight_scale_inv"), fp8_config((128, 128)), False),
    "floats": (fp8(kind="tensor"), compressed_groups(FLOAT, "float-quantized"), False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_expanded_weights_give_the_bits_of_the_twin(
    tmp_path: Path, paged_runner: type, back_end: BackEnd, dtype: torch.dtype, kind: str
) -> None:
    quantize, config, has_head = KINDS[kind]
    pair = write_pair(tmp_path, quantize, config, dtype=dtype, has_quantized_head=has_head)
    source = read_source(pair.folder)
    expanded = source.quantization(QuantizationOptions(activations="bfloat16"))
    quantized = load_model(source, back_end=back_end, quantization=expanded)
    models = [quantized, load_model(read_source(pair.twin), back_end=back_end)]
    found, expected = (paged_runner(model).run("a", TOKENS, [7, 20]) for model in models)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "bytes", "fp8", "floats"])
def test_experts_give_the_bits_of_the_twin(tmp_path: Path, paged_runner: type, back_end: BackEnd, kind: str) -> None:
    quantize, config, has_head = KINDS[kind]
    pair = write_pair(tmp_path, quantize, config, has_quantized_head=has_head, has_experts=True)
    source = read_source(pair.folder)
    expanded = source.quantization(QuantizationOptions(activations="bfloat16"))
    quantized = load_model(source, back_end=back_end, quantization=expanded)
    models = [quantized, load_model(read_source(pair.twin), back_end=back_end)]
    found, expected = (paged_runner(model).run("a", TOKENS, [7, 20]) for model in models)
    assert torch.equal(found, expected)
    if back_end.name == "cpp":
        assert quantized.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=expanded)


NEWER = {  # families with the tensors of Llama, or some of them
    "GraniteForCausalLM": {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "CohereForCausalLM": {"logit_scale": 0.5, "tie_word_embeddings": False},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", NEWER)
def test_newer_families_give_the_bits_of_the_twin(
    tmp_path: Path, paged_runner: type, back_end: BackEnd, family: str
) -> None:
    pair, logits = write_pair(tmp_path, gptq(**ORDERED), gptq_config(**ORDERED)), []
    for folder in (pair.folder, pair.twin):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [family]} | NEWER[family]))
        source = read_source(folder)
        found = source.quantization(QuantizationOptions(activations="bfloat16" if folder == pair.folder else None))
        model = load_model(source, back_end=back_end, quantization=found)
        logits.append(paged_runner(model).run("a", TOKENS, [7, 20]))
    assert torch.equal(*logits)


@covering({"kind": list(KINDS), "activations": (None, "bfloat16"), "has_experts": (False, True)})
def test_ranks_have_the_bits_of_one(
    tmp_path: Path, paged_runner: type, back_end: BackEnd, kind: str, activations: Activations | None, has_experts: bool
) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    quantize, config, has_head = KINDS[kind]
    pair = write_pair(tmp_path, quantize, config, has_quantized_head=has_head, has_experts=has_experts)
    source = read_source(pair.folder)
    quantization = source.quantization(QuantizationOptions(activations=activations))
    assert_ranks_have_the_bits_of_one(
        source.spec,
        lambda ranks: load_model(source, back_end=back_end, quantization=quantization, ranks=ranks),
        lambda model: paged_runner(model).run("a", TOKENS, [7, 20, 12]),
    )


@pytest.mark.parametrize("kind", ["gptq, its head too", "packed, its head too", "bytes"])
def test_int8_activations_stay_close_to_the_twin(
    tmp_path: Path, paged_runner: type, back_end: BackEnd, kind: str
) -> None:
    quantize, config, has_head = KINDS[kind]
    pair = write_pair(tmp_path, quantize, config, dtype=torch.float32, has_quantized_head=has_head)
    models = [load_model(read_source(folder), back_end=back_end) for folder in (pair.folder, pair.twin)]
    found, expected = (paged_runner(model).run("a", TOKENS, [39]) for model in models)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_modules_with_scales_of_their_own_are_fused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, fp8(kind="tensor"), compressed_groups(FLOAT, "float-quantized"))
    modules = [(f"model.layers.0.self_attn.{end}", rows) for end, rows in QKV.items()]
    weight = read(pair.folder, *modules, width=WIDTH)
    assert weight.scales is not None
    assert len(weight.scales.unique()) == 3
    assert torch.equal(values(weight), torch.cat([pair.values[name] for name, _ in modules]))


def test_parameters_are_counted_as_those_of_the_twin(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, gptq(4, 32), gptq_config(4, 32))
    found, expected = (load_model(read_source(folder), back_end=TORCH) for folder in (pair.folder, pair.twin))
    assert found.num_parameters == expected.num_parameters


def test_ignored_modules_stay_dense(tmp_path: Path) -> None:
    kinds = {end: gptq(4, 32) for end in ENDS if end != "o_proj"}
    pair = write_pair(tmp_path, kinds, gptq_config(4, 32, dynamic={r"-:.*\.o_proj": {}}))
    assert read(pair.folder, ("model.layers.0.self_attn.o_proj", WIDTH), width=WIDTH).format == "dense"
    load_model(read_source(pair.folder), back_end=TORCH)


def test_modules_without_packed_tensors_are_read_dense(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, {end: gptq(4, 32) for end in ENDS if end != "o_proj"}, gptq_config(4, 32))
    assert read(pair.folder, ("model.layers.0.self_attn.o_proj", WIDTH), width=WIDTH).format == "dense"


@pytest.mark.parametrize(
    ("v_proj", "rule"),
    [
        (None, {"-:.*v_proj": {}}),
        (gptq(8, 32), {"+:.*v_proj": {"bits": 8}}),
        (gptq(4, 16), {".*v_proj": {"group_size": 16}}),
    ],
    ids=["dense", "8 bits", "smaller groups"],
)
def test_fused_modules_of_different_formats_are_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, v_proj: Quantize | None, rule: dict[str, object]
) -> None:
    kinds = {end: gptq(4, 32) for end in ENDS if end != "v_proj"} | ({} if v_proj is None else {"v_proj": v_proj})
    pair = write_pair(tmp_path, kinds, gptq_config(4, 32, dynamic=rule), dtype=torch.float32)
    stem = "model.layers.0.self_attn."
    weight = read(pair.folder, *((stem + end, rows) for end, rows in QKV.items()), width=WIDTH)
    assert weight.format == "dense"
    twin = load_file(pair.twin / "model.safetensors")
    assert torch.equal(values(weight), torch.cat([twin[f"{stem}{end}.weight"] for end in QKV]))
    assert f"{stem}q_proj, {stem}k_proj, {stem}v_proj differ in format" in caplog.text
    caplog.clear()
    load_model(read_source(pair.folder), back_end=TORCH)
    assert caplog.text.count("differ in format") == 1


def test_fused_modules_may_have_zero_points_of_different_kinds(tmp_path: Path) -> None:
    kinds = {end: gptq(4, 32, sym=end != "k_proj") for end in ENDS}
    pair = write_pair(tmp_path, kinds, gptq_config(4, 32, sym=False))
    modules = [(f"model.layers.0.self_attn.{end}", rows) for end, rows in QKV.items()]
    weight = read(pair.folder, *modules, width=WIDTH)
    assert isinstance(weight.zero_points, torch.Tensor)
    assert torch.equal(values(weight), torch.cat([pair.values[name] for name, _ in modules]))


def test_an_engine_generates_what_one_of_the_twin_does(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, gptq(**ORDERED), gptq_config(**ORDERED))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=5, ignore_eos=True)
    answers = []
    for folder, options in ((pair.folder, {"quantization_activations": "bfloat16"}), (pair.twin, {})):
        with LLM(str(folder), num_kv_blocks=16, max_num_seqs=2, **options) as llm:
            (output,) = llm.generate([TOKENS], params, use_tqdm=False)
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("activations", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "bytes"])
def test_layers_of_parts_compute_columns_of_the_whole(
    tmp_path: Path, back_end: BackEnd, kind: str, activations: Activations
) -> None:
    if back_end.name == "torch" and activations == "bfloat16":
        pytest.skip("a sum of PyTorch's dense product depends on the number of outputs")
    quantize, config, _ = KINDS[kind]
    pair, name = write_pair(tmp_path, quantize, config), "model.layers.1.mlp.up_proj"
    x = torch.randn(5, WIDTH).bfloat16()
    found = []
    for cuts in ([], [48], [16, 80]):
        parts = [
            read(pair.folder, (name, INNER), width=WIDTH, rows=[rows], dtype=torch.bfloat16, activations=activations)
            for rows in pairwise([0, *cuts, INNER])
        ]
        found.append(torch.cat([linear_of(back_end, part, x) for part in parts], dim=1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_fused_modules_with_different_activations_are_expanded(tmp_path: Path) -> None:
    config = compressed_config(8, storage=BYTES, input_activations=TOKEN_INT8)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**group, "targets": ["re:.*k_proj"], "input_activations": None}
    pair = write_pair(tmp_path, compressed(8, storage=BYTES), config)
    modules = [(f"model.layers.0.self_attn.{end}", rows) for end, rows in QKV.items()]
    weight = read(pair.folder, *modules, width=WIDTH, activations=None)
    assert weight.format == "dense"
    assert torch.equal(values(weight), torch.cat([pair.values[name] for name, _ in modules]))


@pytest.mark.parametrize("kind", ["gptq", "gptq, its head too", "awq", "packed", "bytes"])
def test_int8_activations_give_the_same_bits_on_every_back_end(tmp_path: Path, back_end: BackEnd, kind: str) -> None:
    quantize, config, _ = KINDS[kind]
    pair, name = write_pair(tmp_path, quantize, config), "model.layers.1.mlp.down_proj"
    weight = read(pair.folder, (name, WIDTH), width=INNER, dtype=torch.bfloat16, activations="int8")
    assert weight.activation_group_size
    x = torch.randn(5, INNER).bfloat16()
    assert torch.equal(linear_of(back_end, weight, x), reference(x, weight))


SUMMED = KINDS | {
    "gptq": (gptq(4, 32), gptq_config(4, 32), False),
    "fp8": (fp8((32, 32), name="weight_scale_inv"), fp8_config((32, 32)), False),
}


@pytest.mark.parametrize("kind", SUMMED)
def test_ranks_add_partial_sums_of_whole_groups(
    tmp_path: Path, paged_runner: type, back_end: BackEnd, kind: str
) -> None:
    """With int8 activations, which may be rounded in other groups, the error is that of one process."""
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    quantize, config, has_head = SUMMED[kind]
    pair = write_pair(tmp_path, quantize, config, dtype=torch.float32, has_quantized_head=has_head)
    source = read_source(pair.folder)

    def run(activations: Activations | None, num_ranks: int) -> Tensor:
        quantization = source.quantization(QuantizationOptions(activations=activations))

        def load(ranks: Ranks | None) -> Decoder:
            decoder = load_model(source, back_end=back_end, quantization=quantization, ranks=ranks)
            shard = None if ranks is None else ranks.shard
            assert decoder.weight_bytes == weight_bytes(source.spec, "float32", quantization=quantization, shard=shard)
            return decoder

        def use(decoder: Decoder | RankDecoder) -> Tensor:
            return paged_runner(decoder).run("a", TOKENS, [7, 20])

        return use(load(None)) if num_ranks == 1 else logits_of_ranks(num_ranks, source.spec, load, use, "reduce")

    exact = run("bfloat16", 1)
    torch.testing.assert_close(run("bfloat16", 2), exact, rtol=0, atol=2e-5)
    ours, alone = ((run(None, num_ranks) - exact).square().mean().sqrt() for num_ranks in (2, 1))
    assert ours <= 1.2 * alone + 1e-5


@pytest.mark.parametrize(
    ("kind", "num_ranks", "reason"),
    [
        ("gptq", 2, r"inputs of \S+o_proj that share a scale are not consecutive \(desc_act\)"),
        ("awq", 4, r"each 32 inputs of \S+o_proj share a scale, .* ends at input 16; use --"),
    ],
)
def test_partial_sums_that_would_cut_a_group_are_refused(
    tmp_path: Path, back_end: BackEnd, kind: str, num_ranks: int, reason: str
) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    quantize, config, has_head = KINDS[kind]
    source = read_source(write_pair(tmp_path, quantize, config, has_quantized_head=has_head).folder)
    layout = MemoryLayout.of(source.spec, 8, num_ranks)
    with pytest.raises(ConfigError, match=f"tensor_parallel_mode 'reduce': {reason}"):
        load_model(source, back_end=back_end, ranks=make_ranks(num_ranks, layout, "reduce")[0])
