"""Mixtures of experts in Triton against those of PyTorch: choices, groups of rows, results in every weight format."""

import pytest
import torch

from kernels.test_experts import BIASED, has_scored, random_bias
from kernels.test_quantized import random_weight
from kernels.triton.test_products import on, random
from quire.core.errors import ConfigError
from quire.kernels.layers import Activation, Expert, Routing
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.experts import TorchExperts, route
from quire.kernels.reference.linear import make_linear
from quire.kernels.triton.row_groups import group_rows
from quire.kernels.triton.triton_experts import TritonExperts, choose
from quire.kernels.triton.triton_linear import CudaLinear
from support.interpreter import rows_alike
from support.pairwise import covering

WIDTH, INNER, NUM_EXPERTS = 40, 24, 5
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
ROUTINGS = [Routing(2, True), Routing(3, False), Routing(2, False, True), Routing(5, True, True), Routing(1, True)]
FORMATS = [("dense", "", 0), ("int8", "constant", 8), ("int4", "zeros", 0), ("int4", "minimums", 0), ("fp8", "", 0),
           ("codebook4", "", 0)]  # fmt: skip


def weight(
    sizes: tuple[int, int], seed: int, dtype: torch.dtype, form: tuple[str, str, int] = FORMATS[0]
) -> LinearWeight:
    weight_format, kind, activation_group_size = form
    if weight_format == "dense":
        return LinearWeight.dense(random(*sizes, seed=seed).mul(sizes[1] ** -0.5).to(dtype))
    torch.manual_seed(seed)
    fields = {"activation_group_size": activation_group_size} if activation_group_size else {}
    return random_weight(sizes, 8, weight_format, kind, dtype=dtype, **fields)


def mixtures(
    device: torch.device, routing: Routing, dtype: torch.dtype = torch.float32, form: tuple[str, str, int] = FORMATS[0],
    activation: Activation = "silu_and_mul", *, has_biases: bool = False, is_exact: bool = False,
) -> tuple[TritonExperts, TorchExperts]:  # fmt: skip
    """Return the same mixture of both back ends."""
    count = NUM_EXPERTS + routing.has_shared
    router = LinearWeight.dense(random(count, WIDTH, seed=3).to(dtype))
    own, expected = [], []
    for number in range(count):
        inner = INNER + 16 * (number == NUM_EXPERTS)  # the shared expert has another width
        up, down = weight((2 * inner, WIDTH), 7 + number, dtype, form), weight((WIDTH, inner), 90 + number, dtype, form)
        biases = [random(size, seed=5 + number).to(dtype) if has_biases else None for size in (2 * inner, WIDTH)]
        makes = (lambda each, bias, **how: CudaLinear(
            on(device, each), None if bias is None else bias.to(device), is_exact=is_exact, **how
        )), make_linear  # fmt: skip
        for make, found in zip(makes, (own, expected), strict=True):
            found.append(
                Expert(make(up, biases[0], activation=activation), make(down, biases[1], dtype=torch.float32))
            )
    scores = CudaLinear(on(device, router), dtype=torch.float32, is_exact=is_exact)
    expected_scores = make_linear(router, dtype=torch.float32)
    return TritonExperts(scores, own, routing), TorchExperts(expected_scores, expected, routing)


@pytest.mark.parametrize("routing", [*ROUTINGS, *BIASED], ids=str)
def test_experts_are_chosen_and_weighted_as_by_pytorch(routing: Routing, device: torch.device) -> None:
    scores, bias = random(40, 6 + has_scored(routing)), random_bias(routing)
    scores[:5, 1:4] = torch.tensor([[0.0, -0.0, 0.0], [1, 1, 1], [-2, -2, -2], [-0.0, 0.0, -0.0], [9, 9, 9]])
    chosen, weights = choose(scores.to(device), routing, None if bias is None else bias.to(device))
    expected, expected_weights = route(routing, scores, bias)
    assert torch.equal(chosen.cpu().long(), expected[:, : routing.num_chosen])
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_scores_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    scores = torch.tensor([[float("nan")] * 5, [float("-inf")] * 5, [1.0, -float("nan"), float("inf"), 0, 2]])
    chosen, weights = choose(scores.to(device), Routing(3, False))
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 5 for row in chosen.tolist())
    assert weights.isnan().all(dim=1).tolist() == [True, True, True]


@pytest.mark.parametrize("height", [4, 16])
@pytest.mark.parametrize(
    "groups",
    [[2] * 37, [0], [-1] * 9, [4, -1, 3, 3, 0, -1, 4], [each % 6 - 1 for each in range(2500)], [-1] * 90 + [1, 0]],
    ids=["all of one", "one row", "none", "some", "many", "few at the end"],
)
def test_tiles_have_every_row_of_a_group_once_in_ascending_order(
    groups: list[int], height: int, device: torch.device
) -> None:
    found = group_rows(torch.tensor(groups, dtype=torch.int32, device=device), NUM_EXPERTS, height)
    order, starts = found.order.tolist(), found.starts.tolist()
    rows: dict[int, list[int]] = {}
    for group, start in zip(found.tile_groups.tolist(), found.tile_rows.tolist(), strict=True):
        if group != -1:
            rows.setdefault(group, []).extend(order[start : min(start + height, starts[group + 1])])
    expected = {group: [row for row, each in enumerate(groups) if each == group] for group in set(groups) - {-1}}
    assert rows == expected
    assert len(found.tile_groups) == len(groups) // height + NUM_EXPERTS


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 50])
def test_results_are_those_of_pytorch(num_rows: int, routing: Routing, device: torch.device) -> None:
    mixture, expected = mixtures(device, routing)
    x = random(num_rows, WIDTH, seed=4)
    torch.testing.assert_close(mixture(x.to(device)).cpu(), expected(x), rtol=1e-5, atol=1e-5)
    assert mixture(x[:0].to(device)).shape == (0, WIDTH)
    assert mixture.num_bytes > 0


@covering({"form": FORMATS, "dtype": [torch.float32, torch.float16], "num_rows": [2, 48]})  # tiles of 16 rows, of 64
def test_weights_of_every_format_are_served(
    form: tuple[str, str, int], dtype: torch.dtype, num_rows: int, device: torch.device
) -> None:
    mixture, expected = mixtures(device, Routing(2, True), dtype, form, "clamped_silu_and_mul", has_biases=True)
    x = random(num_rows, WIDTH, seed=4).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    result, wanted = mixture(x.to(device)).cpu(), expected(x)
    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def test_all_rows_may_choose_the_same_experts(device: torch.device) -> None:
    mixture, expected = mixtures(device, Routing(2, True), torch.float16)
    x = random(1, WIDTH, seed=4).half().expand(70, -1).contiguous()
    result = mixture(x.to(device)).cpu()
    torch.testing.assert_close(result, expected(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("routing", ROUTINGS[1:3], ids=str)
def test_row_of_an_exact_mixture_has_the_same_bits_in_any_company(
    routing: Routing, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_alike(monkeypatch)
    mixture, _ = mixtures(device, routing, torch.float16, is_exact=True)
    x = random(150, WIDTH, seed=4).half().to(device)
    together = mixture(x)
    for first, last in ((0, 1), (5, 22), (100, 150)):
        assert torch.equal(mixture(x[first:last]), together[first:last])


def test_scattered_groups_are_refused_by_name(device: torch.device) -> None:
    index = torch.arange(WIDTH, dtype=torch.int32) % 2
    scattered = random_weight((16, WIDTH), 20, "int4", "zeros", group_index=index)
    layers = [CudaLinear(on(device, each)) for each in (scattered, scattered)]
    router = CudaLinear(on(device, LinearWeight.dense(random(2, WIDTH))), dtype=torch.float32)
    with pytest.raises(ConfigError, match="desc_act"):
        TritonExperts(router, [Expert(layer, layer) for layer in layers], Routing(1, True))


