"""Products of few rows in Triton, with norms in front and residuals behind, against the single ops."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.triton.test_engine import SMALL
from kernels.triton.test_products import random
from quire.kernels.choice import cuda_back_end
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.paged_attention import Heads, RotarySpec
from quire.kernels.program import LayerInputs, RotaryWriteOp
from quire.kernels.reference.linear import make_linear
from quire.kernels.reference.norm import TorchNorm
from quire.kernels.triton.few_rows import MAX_ROWS, TILES, SummedProducts, few_rows_product, projected_query, serves
from quire.kernels.triton.triton_kv_cache_write import write_kv
from quire.kernels.triton.triton_linear import CudaLinear
from quire.kernels.triton.triton_norm import TritonNorm
from quire.model.loader import load_model
from support.interpreter import rows_alike
from support.paged_runner import PagedRunner
from support.pairwise import covering
from support.random_folder import write_random_folder

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
HALF = torch.float16  # the interpreter cannot multiply bfloat16
WIDTH = 300  # two slices of inputs, the second not full


def layers(
    device: torch.device, num_outputs: int, activation: Activation = "none", *, has_bias: bool = False
) -> tuple[CudaLinear, object]:
    """Return a layer of both back ends."""
    weight = random(num_outputs, WIDTH, seed=2).mul(WIDTH**-0.5).to(HALF)
    bias = random(num_outputs, seed=3).to(HALF) if has_bias else None
    own = CudaLinear(
        LinearWeight.dense(weight.to(device)), None if bias is None else bias.to(device), activation=activation
    )
    return own, make_linear(LinearWeight.dense(weight), bias, activation=activation)


@covering(
    {
        "num_rows": [0, 1, 12, 20, MAX_ROWS], "activation": ["none", "silu_and_mul", "gelu_tanh"], "offset": [None, 1.0]
    }
)  # fmt: skip
def test_norm_layer_and_residual_are_those_of_single_ops(
    num_rows: int, activation: Activation, offset: float | None, device: torch.device
) -> None:
    layer, expected = layers(device, 72, activation, has_bias=True)
    x = random(num_rows, WIDTH, seed=5).mul(3).to(HALF)
    norm_weight, residual = random(WIDTH, seed=6).to(HALF), random(num_rows, 72, seed=7).to(HALF)
    norm, plain = (
        make(norm_weight.to(where), None, 1e-5, False, offset)
        for make, where in ((TritonNorm, device), (TorchNorm, torch.device("cpu")))
    )
    num_outputs = 36 if activation == "silu_and_mul" else 72
    residual = residual[:, :num_outputs].contiguous()
    found = few_rows_product(x.to(device), layer, norm=norm, residual=residual.clone().to(device)).cpu()
    wanted = (expected(plain(x)[0]).float() + residual.float()).to(HALF)  # type: ignore[operator]
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=5e-2)
    found = few_rows_product(x.to(device), layer).cpu()
    torch.testing.assert_close(found, expected(x), rtol=1e-2, atol=2e-2)  # type: ignore[operator]


@pytest.mark.parametrize("num_rows", [8, 17, MAX_ROWS])
def test_programs_that_share_inputs_add_up_their_sums(num_rows: int, device: torch.device) -> None:
    """Again and again: the counters are 0 behind a launch."""
    layer, expected = layers(device, 72, has_bias=True)
    x, residual = random(num_rows, WIDTH, seed=5).to(HALF), random(num_rows, 72, seed=7).to(HALF)
    found = [few_rows_product(x.to(device), layer, residual=residual.clone().to(device)).cpu() for _ in range(3)]
    wanted = (expected(x).float() + residual.float()).to(HALF)  # type: ignore[operator]
    torch.testing.assert_close(found[0], wanted, rtol=1e-2, atol=2e-2)
    assert all(torch.equal(each, found[0]) for each in found)


def test_row_has_the_same_bits_beside_others_of_its_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_alike(monkeypatch)
    layer, _ = layers(device, 40, "silu_and_mul")
    norm = TritonNorm(random(WIDTH, seed=6).to(HALF).to(device), None, 1e-5, False)
    x = random(TILES[0].max_rows, WIDTH, seed=5).to(HALF).to(device)
    together = few_rows_product(x, layer, norm=norm)
    assert torch.equal(few_rows_product(x[4:5], layer, norm=norm), together[4:5])


@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 24)], ids=str)
@pytest.mark.parametrize(("rotary_dim", "is_interleaved"), [(None, False), (16, False), (16, True), (8, False)])
def test_queries_and_caches_are_those_of_the_single_ops(
    heads: Heads, rotary_dim: int | None, is_interleaved: bool, device: torch.device
) -> None:
    """To the bit: the product is rounded before it is rotated. Two rows are padding."""
    num_rows, (num_heads, num_kv_heads, head_dim) = 5, heads
    num_outputs = (num_heads + 2 * num_kv_heads) * head_dim
    weight, bias = random(num_outputs, WIDTH, seed=2).mul(WIDTH**-0.5).to(HALF), random(num_outputs, seed=3).to(HALF)
    layer = CudaLinear(LinearWeight.dense(weight.to(device)), bias.to(device))
    norm = TritonNorm(random(WIDTH, seed=6).to(HALF).to(device), None, 1e-5, False)
    x = random(num_rows, WIDTH, seed=5).to(HALF).to(device)
    positions, slots = torch.tensor([3, 0, 8, 0, 0]).to(device), torch.tensor([17, 0, 5, -1, -1]).to(device)
    cos_sin = None if rotary_dim is None else random(9, rotary_dim, seed=8).to(device)
    op = RotaryWriteOp("write", 0, RotarySpec(heads, cos_sin, is_interleaved), write_kv)
    caches = [torch.zeros(2, 3, 8, num_kv_heads, head_dim, dtype=HALF, device=device) for _ in range(2)]
    keys, values = ([each] for each in caches[0])
    inputs = LayerInputs(positions, slots, SimpleNamespace(), keys, values)  # type: ignore[arg-type]
    found = projected_query(x, layer, norm, op, inputs)
    parts = few_rows_product(x, layer, norm=norm).view(num_rows, -1, head_dim)
    parts = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = write_kv(op.spec, *parts, positions, *caches[1], slots)
    assert torch.equal(found, expected)
    assert torch.equal(*caches)
    assert caches[0].count_nonzero() > 2 * 3 * num_kv_heads * head_dim * 0.9, "three rows have slots"


@pytest.mark.parametrize(
    ("settings", "is_served"), [({}, True), ({"is_exact": True}, False), ({"dtype": torch.float32}, False)], ids=str
)
def test_exact_layers_and_those_of_other_types_are_not_served(settings: dict[str, object], is_served: bool) -> None:
    weight = LinearWeight.dense(random(8, 16).bfloat16())
    assert serves(CudaLinear(weight, **settings)) == is_served  # type: ignore[arg-type]
    assert not serves(CudaLinear(LinearWeight.dense(random(8, 16).half())))


INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
FUSED = {"Llama": 3, "Cohere": 0, "Gemma2": 0}  # parallel layers, and norms of a sublayer's results, stay single ops


@pytest.mark.skipif(not INTERPRETS, reason="host tensors")
@pytest.mark.parametrize("name", ["Llama", "Cohere", pytest.param("Gemma2", marks=pytest.mark.matrix)])
def test_programs_have_the_hidden_states_of_single_ops(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.triton.few_rows.DTYPES", (HALF,))
    config = SMALL | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    folder = write_random_folder(tmp_path, config, HALF)
    plain = replace(cuda_back_end(), fuse=lambda program: program)
    model = load_model(folder, back_end=cuda_back_end())
    fused = [op for op in model._programs[0].ops if isinstance(op, SummedProducts)]
    assert len(fused) == FUSED[name]
    assert sum(bool(op.behind) for op in fused) == FUSED[name] // 2, "into queries of the second layer"
    exact = load_model(folder, back_end=cuda_back_end(is_exact=True))
    assert not any(isinstance(op, SummedProducts) for op in exact._programs[0].ops)
    found, expected = (
        PagedRunner(each).run("a", [3 * i % 61 for i in range(60)], [34, 17, 9])
        for each in (model, load_model(folder, back_end=plain))
    )
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


def test_more_rows_leave_no_more_activations_than_single_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of the first layer that stays while the second multiplies is memory that the KV cache could have."""
    monkeypatch.setattr("quire.kernels.triton.few_rows.DTYPES", (HALF,))
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    program = load_model(write_random_folder(tmp_path, config, HALF), back_end=cuda_back_end())._programs[0]
    op = next(op for op in program.ops if isinstance(op, SummedProducts) and not op.behind)
    rows, kept = torch.zeros(MAX_ROWS + 1, 8), list[set[str]]()
    activations = {name: rows.clone() for name in op.reads}

    def multiply(x: torch.Tensor) -> torch.Tensor:
        kept.append(set(activations))
        return x.clone()

    norm = replace(op.norm, norm=lambda x, residual: (x, residual))
    first, second = (replace(each, linear=multiply) for each in (op.first, op.second))
    replace(op, first=first, norm=norm, second=second).run(activations, SimpleNamespace(adapters=None))
    assert kept == [set(op.reads), {op.norm.summed, op.norm.out}]
    assert activations.keys() == set(op.writes)


def test_write_to_a_cache_of_8_bits_is_an_op_of_its_own(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.triton.few_rows.DTYPES", (HALF,))
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    model = load_model(write_random_folder(tmp_path, config, HALF), back_end=cuda_back_end())
    op, written = next(op for op in model._programs[0].ops if isinstance(op, SummedProducts) and op.behind), list[str]()
    split, rotary = op.behind
    behind = split, replace(rotary, write=lambda query, *others: written.append(rotary.name) or query)
    inputs = SimpleNamespace(adapters=None, keys=[torch.zeros(1, dtype=torch.int8)] * 2, values=[None] * 2)
    inputs.positions = inputs.slot_mapping = None
    first, stream = (torch.zeros(2, each.linear.weight.in_features, dtype=HALF) for each in (op.first, op.second))
    activations = {op.reads[0]: first.to(device), op.reads[1]: stream.to(device)}
    replace(op, behind=behind).run(activations, inputs)
    assert written == [rotary.name]
    assert activations.keys() == {op.reads[0], *op.writes}
