"""Mixtures of experts in C++ against PyTorch's, and to the bit against themselves among other rows and threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.test_experts import BIASED, has_scored, random_bias
from quire.engine.parallel.rank_messages import MemoryLayout
from quire.engine.parallel.shared_memory import SharedRanks
from quire.kernels.layers import GATED, Activation, Expert, ExpertSplit, Routing
from quire.kernels.linear_weight import CODEBOOK4, DENSE, FP8, INT4, INT8, LinearWeight
from quire.kernels.quantized import round_to_nearest
from quire.kernels.reference.experts import TorchExperts
from support.cpp_kernels import CppExperts, CppLinear
from support.on_tensors import TensorHook
from support.pairwise import covering
from support.thread_ranks import in_threads, make_ranks
from support.threads import set_num_threads

WIDTH = 80
NUM_ROWS = (1, 2, 3, 7, 17, 64, 200)
A8, A16 = "int8 activations", "expanded"
FORMATS = [(DENSE, A16), (INT8, A8), (INT4, A8), (INT4, A16), (FP8, A16), (CODEBOOK4, A16)]


def weight_of(values: Tensor, weight_format: str, arithmetic: str) -> LinearWeight:
    """Return values [out_features, in_features] in a weight format, in groups of 32."""
    if weight_format == DENSE:
        return LinearWeight.dense(values)
    if weight_format in (INT8, INT4):
        return round_to_nearest(values, weight_format, 32, activation_group_size=32 if arithmetic == A8 else 0)
    (num_rows, width), is_code = values.shape, weight_format == CODEBOOK4
    elements = torch.randint(16, values.shape, dtype=torch.uint8) if is_code else values.to(torch.float8_e4m3fn)
    return LinearWeight(
        weight_format, (elements.view(torch.uint8),), num_rows, width, torch.rand(num_rows, -(-width // 32)),
        group_size=32, codebook=torch.linspace(-0.2, 0.2, 16) if is_code else None, dtype=values.dtype,
    )  # fmt: skip


def layer(
    in_features: int, out_features: int, kind: tuple[str, str], dtype: torch.dtype, activation: Activation = "none",
    *, has_bias: bool = False, is_float: bool = False,
) -> CppLinear:  # fmt: skip
    rows = out_features * (2 if activation in GATED else 1)
    values, bias = (torch.randn(rows, in_features) * in_features**-0.5).to(dtype), torch.randn(rows).to(dtype)
    return CppLinear(
        weight_of(values, *kind), bias if has_bias else None, dtype=torch.float32 if is_float else None,
        activation=activation,
    )  # fmt: skip


def mixture(
    routing: Routing, kind: tuple[str, str] = (DENSE, A16), dtype: torch.dtype = torch.bfloat16, *,
    num_experts: int = 6, inner: int = 72, activation: Activation = "silu_and_mul", has_bias: bool = False,
) -> tuple[CppLinear, list[Expert]]:  # fmt: skip
    """Return the router and the experts; a shared one is wider than the others."""
    sizes = [inner] * num_experts + [2 * inner + 8] * routing.has_shared
    experts = [
        Expert(
            layer(WIDTH, size, kind, dtype, activation, has_bias=has_bias),
            layer(size, WIDTH, kind, dtype, has_bias=has_bias, is_float=True),
        )
        for size in sizes
    ]
    num_scores = num_experts + has_scored(routing)
    return layer(WIDTH, num_scores, (DENSE, A16), dtype, has_bias=has_bias, is_float=True), experts


@covering(
    {
        "num_ranks": [2, 3],
        "routing": [Routing(2, True), Routing(3, False, True)],
        "make": [CppExperts, TorchExperts],
    },
)
def test_ranks_have_columns_of_the_whole(num_ranks: int, routing: Routing, make: type[CppExperts]) -> None:
    sizes, (router, _) = [72] * 6 + [104] * routing.has_shared, mixture(routing)
    weights = [(torch.randn(2, size, WIDTH) / 9, torch.randn(WIDTH, size) / 9) for size in sizes]
    x = torch.randn(3000, WIDTH).bfloat16()  # more inner activations than are exchanged at once

    def experts_of(rank: SharedRanks | None) -> list[Expert]:
        def own(width: int) -> slice:
            return slice(None) if rank is None else slice(*rank.shard.cut(width).of(rank.shard.rank))

        def linear(weight: Tensor, **options: Any) -> CppLinear:  # noqa: ANN401
            return CppLinear(LinearWeight.dense(weight.bfloat16()), **options)

        return [
            Expert(
                linear(up[:, own(up.shape[1])].flatten(0, 1), activation="silu_and_mul"),
                linear(down[own(WIDTH)], dtype=torch.float32),
            )
            for up, down in weights
        ]

    def compute(rank: SharedRanks) -> Tensor:
        shared = TensorHook(rank.gather(rank.shard.cut(104))) if routing.has_shared else None
        cut = rank.shard.cut(WIDTH)
        first, stop = cut.of(rank.shard.rank)
        split = ExpertSplit(stop - first, TensorHook(rank.gather(rank.shard.cut(72))), shared)
        compute = make(router, experts_of(rank), routing, split)
        assert compute(x[:0]).shape == (0, stop - first)
        parts = torch.cat([compute(x[:1]), compute(x[1:])])
        return torch.stack([TensorHook(rank.gather(cut))(rows) for rows in (compute(x), parts)])

    layout = MemoryLayout(region_bytes=1 << 16, max_rows=4, vocab_size=33)
    expected = make(router, experts_of(None), routing)(x)
    for found in in_threads(make_ranks(num_ranks, layout), compute):
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], expected)


@covering(
    {
        "num_ranks": [2, 3],
        "routing": [Routing(2, True), Routing(3, False, True)],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
    },
)
def test_ranks_that_have_inputs_of_second_layers_add_up_their_results(
    num_ranks: int, routing: Routing, dtype: torch.dtype
) -> None:
    """Parts are uneven; a row has the same bits alone and among many, of which some are computed at once."""
    sizes, (router, _) = [40] * 6 + [104] * routing.has_shared, mixture(routing, dtype=dtype)
    weights = [(torch.randn(2, size, WIDTH) / 9, torch.randn(WIDTH, size) / 9, torch.randn(WIDTH)) for size in sizes]
    x = torch.randn(3000, WIDTH).to(dtype)

    def experts_of(rank: SharedRanks | None) -> list[Expert]:
        def own(width: int) -> slice:
            return slice(None) if rank is None else slice(*rank.shard.cut(width).of(rank.shard.rank))

        def linear(weight: Tensor, bias: Tensor | None = None, **options: Any) -> CppLinear:  # noqa: ANN401
            return CppLinear(LinearWeight.dense(weight.to(dtype)), bias, **options)

        return [
            Expert(
                linear(up[:, own(up.shape[1])].flatten(0, 1), activation="silu_and_mul"),
                linear(
                    down[:, own(up.shape[1])].contiguous(), dtype=torch.float32,
                    bias=bias.to(dtype) if rank is None or rank.shard.rank == 0 else None,
                ),
            )
            for up, down, bias in weights
        ]  # fmt: skip

    def compute(rank: SharedRanks) -> list[Tensor]:
        split = ExpertSplit(WIDTH, None, None, TensorHook(rank.sum(WIDTH)))
        layers = experts_of(rank)
        compute, plain = (make(router, layers, routing, split) for make in (CppExperts, TorchExperts))
        return [compute(x), torch.cat([compute(x[:1]), compute(x[1:])]), plain(x)]

    layout = MemoryLayout(region_bytes=1 << 16, max_rows=4, vocab_size=33)
    expected = CppExperts(router, experts_of(None), routing)(x)
    first, *others = in_threads(make_ranks(num_ranks, layout), compute)
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (8e-3, 4e-3), torch.float16: (1e-3, 1e-3)}[dtype]
    torch.testing.assert_close(first[0], expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(first[2], expected, rtol=rtol, atol=atol)
    assert torch.equal(first[0], first[1])
    assert all(torch.equal(found[0], first[0]) for found in others)


@pytest.mark.parametrize("routing", [Routing(2, True), Routing(3, False, True), Routing(6, True), Routing(1, False)])
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_layer_matches_the_experts_one_by_one(kind: tuple[str, str], routing: Routing) -> None:
    router, experts = mixture(routing, kind)
    x = torch.randn(90, WIDTH).bfloat16()
    expected = TorchExperts(router, experts, routing)(x)
    torch.testing.assert_close(CppExperts(router, experts, routing)(x), expected, rtol=8e-3, atol=1e-5)


@pytest.mark.parametrize("routing", BIASED, ids=str)
def test_experts_are_chosen_by_weights_with_biases(routing: Routing) -> None:
    """Scores are float32, so that both choose alike; some rows have equal scores, and a row is alone among others."""
    router, experts = mixture(routing, dtype=torch.float32)
    bias, x = random_bias(routing), torch.randn(90, WIDTH)
    x[40:44] = 0.0
    compute = CppExperts(router, experts, routing, None, bias)
    expected = TorchExperts(router, experts, routing, None, bias)(x)
    torch.testing.assert_close(compute(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([compute(row[None]) for row in x]), compute(x))


@pytest.mark.parametrize("routing", [Routing(2, True), Routing(3, False, True)], ids=str)
def test_scales_multiply_weights_and_the_router_may_score_other_rows(routing: Routing) -> None:
    """Scores are float32, so that both choose alike. The shared expert has no scale."""
    router, experts = mixture(routing, dtype=torch.float32)
    scales, x, scored = torch.rand(6) + 0.5, torch.randn(90, WIDTH), torch.randn(90, WIDTH)
    compute = CppExperts(router, experts, routing, None, None, scales)
    expected = TorchExperts(router, experts, routing, None, None, scales)(x, scored)
    torch.testing.assert_close(compute(x, scored), expected, rtol=1e-5, atol=1e-5)
    parts = [compute(row[None], other[None]) for row, other in zip(x, scored, strict=True)]
    assert torch.equal(torch.cat(parts), compute(x, scored))
    assert not torch.allclose(compute(x), expected, atol=1e-2)


@pytest.mark.parametrize("scores", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("routing", BIASED, ids=str)
def test_scores_that_are_no_numbers_choose_experts_that_exist(routing: Routing, scores: float) -> None:
    compute = CppExperts(*mixture(routing, dtype=torch.float32), routing, None, random_bias(routing))
    x = torch.randn(20, WIDTH)
    clean = compute(x)
    x[7] = scores
    found = compute(x)
    assert torch.equal(found[8:], clean[8:])
    assert not found[7].isfinite().all()


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_biases_of_pieces_are_those_of_their_outputs(
    dtype: torch.dtype, activation: Activation
) -> None:
    routing = Routing(2, True)
    router, experts = mixture(routing, dtype=dtype, inner=200, activation=activation, has_bias=True)
    x = torch.randn(9, WIDTH).to(dtype)
    set_num_threads(3)  # layers are cut into pieces
    tolerances = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (8e-3, 1e-5), torch.float16: (1e-3, 1e-3)}
    rtol, atol = tolerances[dtype]  # float16: inner activations stay float32 in one call
    expected = TorchExperts(router, experts, routing)(x)
    torch.testing.assert_close(CppExperts(router, experts, routing)(x), expected, rtol=rtol, atol=atol)


@covering(
    {
        "kind": [(DENSE, A16), (INT4, A8), (FP8, A16)],
        "dtype": [torch.float32, torch.bfloat16],
        "num_threads": [1, 2, 3],
    },
    indirect=["num_threads"],
)
def test_rows_have_the_same_bits_among_any_others(kind: tuple[str, str], dtype: torch.dtype, num_threads: int) -> None:
    routing = Routing(2, False, True)
    compute = CppExperts(*mixture(routing, kind, dtype), routing)
    rows = torch.randn(max(NUM_ROWS), WIDTH).to(dtype)
    set_num_threads(1)
    alone = torch.cat([compute(row[None]) for row in rows])
    set_num_threads(num_threads)
    for count in NUM_ROWS:
        assert torch.equal(compute(rows[:count]), alone[:count])
    assert torch.equal(compute(rows.flip(0)), alone.flip(0))


@pytest.mark.parametrize("chosen", [0, 4])
def test_all_rows_to_one_expert(chosen: int) -> None:
    """More rows than are computed at once with others, in no order and as neighbours; other experts have none."""
    routing = Routing(1, True)
    _, experts = mixture(routing)
    towards = torch.zeros(6, WIDTH)
    towards[chosen, 0] = 1.0
    router = CppLinear(LinearWeight.dense(towards.bfloat16()), dtype=torch.float32)
    x = torch.randn(150, WIDTH).bfloat16()
    x[:, 0] = 2.0
    expected = experts[chosen].layer_out(experts[chosen].layer_in(x)).bfloat16()
    assert torch.equal(CppExperts(router, experts, routing)(x), expected)


def test_equal_scores_choose_the_lower_numbers() -> None:
    routing = Routing(2, True)
    _, experts = mixture(routing)
    scores = torch.zeros(6, WIDTH)
    scores[torch.tensor([1, 3, 5]), 0] = 1.0
    router = CppLinear(LinearWeight.dense(scores.bfloat16()), dtype=torch.float32)
    x = torch.randn(5, WIDTH).bfloat16()
    x[:, 0] = torch.tensor([1.0, 1.0, 0.0, 1.0, -1.0])
    results = [(expert.layer_out(expert.layer_in(x)) * 0.5) for expert in experts]
    expected = torch.stack([(results[a] + results[b])[row] for row, (a, b) in
                            enumerate([(1, 3), (1, 3), (0, 1), (1, 3), (0, 2)])])  # fmt: skip
    assert torch.equal(CppExperts(router, experts, routing)(x), expected.bfloat16())


def test_rows_that_are_no_numbers_stay_their_own() -> None:
    routing = Routing(2, True, True)
    compute = CppExperts(*mixture(routing), routing)
    x = torch.randn(20, WIDTH).bfloat16()
    clean = compute(x)
    x[3], x[11, 5] = torch.nan, torch.inf
    found, others = compute(x), torch.tensor([row for row in range(20) if row not in (3, 11)])
    assert found[3].isnan().all()
    assert torch.equal(found[others], clean[others])


def test_rows_beyond_the_scratch_are_computed_in_parts() -> None:
    """64 MiB of scratch hold some thousands of rows of this width."""
    routing = Routing(2, True)
    router, experts = mixture(routing, num_experts=2, inner=16)
    compute = CppExperts(router, experts, routing)
    x = torch.randn(300, WIDTH).bfloat16()
    many = x.repeat(250, 1)
    assert torch.equal(compute(many), compute(x).repeat(250, 1))
