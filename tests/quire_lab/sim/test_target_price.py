"""The price of a target of time: what is left of a step beside its decodes."""

import pytest

from quire.core.plan import StepPlan
from quire_lab.sim.planning import target_prices


def step_s(plan: StepPlan) -> float:
    """10 ms a sequence, and as much for 1,000 tokens of its context."""
    assert plan.kind == "decode"
    return sum(0.01 + 1e-5 * (start + count) for start, count in zip(plan.starts, plan.counts, strict=True))


@pytest.mark.parametrize(
    ("num", "price", "words"),
    [
        (1, 100 / 80, "1.25 x beside 1 decode of 20 ms"),
        (4, 100 / 20, "5.00 x beside 4 decodes of 80 ms"),
        (5, None, "target missed beside 5 decodes of 100 ms"),
        (6, None, "target missed beside 6 decodes of 120 ms"),
    ],
)
def test_prompts_take_longer_by_what_the_decodes_take(num: int, price: float | None, words: str) -> None:
    [found] = target_prices(step_s, 0.1, [num], context_len=1000)
    assert found.price == (None if price is None else pytest.approx(price))
    assert str(found) == words
