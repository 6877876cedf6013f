"""Mixtures of experts in PyTorch against the sum that defines them, in float64."""

import pytest
import torch
from torch import Tensor

from quire.kernels.layers import Expert, Routing
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.experts import TorchExperts, route
from quire.kernels.reference.linear import make_linear

WIDTH, INNER = 24, 40
ROUTINGS = [Routing(2, True), Routing(3, False), Routing(2, False, True), Routing(5, True, True), Routing(1, True)]
BIASED = [
    Routing(2, True, is_sigmoid=True),
    Routing(3, True, is_sigmoid=True, has_bias=True, factor=2.5),
    Routing(3, False, True, is_sigmoid=True, has_bias=True, is_shared_scored=False),
    Routing(2, True, True, has_bias=True, is_shared_scored=False),
    Routing(4, True, True, is_sigmoid=True, has_bias=True, factor=1.5, num_groups=3, num_kept_groups=2),
    Routing(2, False, is_sigmoid=True, has_bias=True, num_groups=3, num_kept_groups=1),
    Routing(2, True, factor=0.5, num_groups=6, num_kept_groups=2),
    Routing(2, False, factor=1.5, num_groups=3, num_kept_groups=1, num_group_keys=1),
]


def dense(weight: Tensor) -> LinearWeight:
    return LinearWeight.dense(weight)


def random_bias(routing: Routing, num_experts: int = 6) -> Tensor | None:
    """Return a bias that changes choices, and makes some keys negative."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_experts, generator=generator) * 0.4 if routing.has_bias else None


def random_mixture(routing: Routing, num_experts: int = 6) -> tuple[TorchExperts, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return a mixture with the router's weight and the experts' weights."""
    generator = torch.Generator().manual_seed(3)
    count = num_experts + routing.has_shared
    router = torch.randn(num_experts + has_scored(routing), WIDTH, generator=generator) * 0.4
    weights = [
        (torch.randn(2 * INNER, WIDTH, generator=generator) * 0.2, torch.randn(WIDTH, INNER, generator=generator) * 0.2)
        for _ in range(count)
    ]
    experts = [
        Expert(make_linear(dense(up), activation="silu_and_mul"), make_linear(dense(down))) for up, down in weights
    ]
    mixture = TorchExperts(make_linear(dense(router)), experts, routing, bias=random_bias(routing, num_experts))
    return mixture, router, weights


def has_scored(routing: Routing) -> bool:
    """Return whether the router has a score of a shared expert."""
    return routing.has_shared and routing.is_shared_scored


def in_best_groups(keys: list[float], routing: Routing) -> list[int]:
    """Return the experts of the groups with the greatest sums of their best keys."""
    size = len(keys) // routing.num_groups
    groups = [list(range(first, first + size)) for first in range(0, len(keys), size)]
    sums = [sum(sorted((keys[expert] for expert in group), reverse=True)[: routing.num_group_keys]) for group in groups]
    best = sorted(range(len(groups)), key=lambda group: (-sums[group], group))[: routing.num_kept_groups]
    return [expert for group in sorted(best) for expert in groups[group]]


def expected_row(x: Tensor, router: Tensor, weights: list[tuple[Tensor, Tensor]], routing: Routing) -> Tensor:
    """Return one row's result, from the definition."""
    scores = router.double() @ x.double()
    routed, bias = scores[:-1] if has_scored(routing) else scores, random_bias(routing)
    weighed = routed.sigmoid() if routing.is_sigmoid else routed.softmax(dim=0)
    keys = (weighed if bias is None else weighed + bias).tolist()
    chosen = sorted(in_best_groups(keys, routing), key=lambda expert: (-keys[expert], expert))[: routing.num_chosen]
    total = weighed[chosen].sum() if routing.is_normalized else 1.0
    shares = {expert: weighed[expert] / total * routing.factor for expert in chosen}
    if routing.has_shared:
        shares[len(routed)] = scores[-1].sigmoid() if routing.is_shared_scored else torch.tensor(1.0)
    result = torch.zeros(WIDTH, dtype=torch.float64)
    for expert, share in shares.items():
        gate, up = (weights[expert][0].double() @ x.double()).chunk(2)
        result += share * (weights[expert][1].double() @ (gate * gate.sigmoid() * up))
    return result


@pytest.mark.parametrize("routing", [*ROUTINGS, *BIASED], ids=str)
def test_rows_are_the_weighted_results_of_their_experts(routing: Routing) -> None:
    mixture, router, weights = random_mixture(routing)
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(4))
    expected = torch.stack([expected_row(row, router, weights, routing) for row in x])
    torch.testing.assert_close(mixture(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert mixture(x[:0]).shape == (0, WIDTH)


def test_scales_multiply_the_weights_of_chosen_experts_alone() -> None:
    scores, scales = torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([2.0, 0.5, 4.0, 8.0])
    chosen, weights = route(Routing(2, True), scores)
    scaled_chosen, scaled = route(Routing(2, True), scores, None, scales)
    assert scaled_chosen.tolist() == chosen.tolist() == [[1, 2]]
    assert scaled[0].tolist() == pytest.approx([0.5 * float(weights[0, 0]), 4.0 * float(weights[0, 1])])


def test_of_equal_scores_the_lower_number_counts_as_higher() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    chosen, weights = route(Routing(3, True), scores)
    assert chosen.tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2]]
    assert weights[1].tolist() == pytest.approx([1 / 3] * 3)
    assert route(Routing(3, False), scores)[1][1].tolist() == pytest.approx([1 / 5] * 3)


def test_shared_expert_comes_last_with_the_sigmoid_of_its_score() -> None:
    chosen, weights = route(Routing(1, True, has_shared=True), torch.tensor([[0.5, 0.7, 40.0], [0.7, 0.5, 0.0]]))
    assert chosen.tolist() == [[1, 2], [0, 2]]
    assert weights.tolist() == [[1.0, 1.0], [1.0, 0.5]]


def test_experts_without_a_row_are_not_used() -> None:
    class Counted:
        """A layer that counts its rows."""

        num_bytes = 0
        num_rows = 0

        def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
            self.num_rows += len(x)
            return x

    layers = [Counted() for _ in range(4)]
    router = make_linear(dense(torch.eye(4, WIDTH)))
    mixture = TorchExperts(router, [Expert(layer, Counted()) for layer in layers], Routing(1, True))
    x = torch.zeros(7, WIDTH)
    x[:, 2] = 1.0
    x[3] = 0.0
    assert torch.equal(mixture(x), x)
    assert [layer.num_rows for layer in layers] == [1, 0, 6, 0]
