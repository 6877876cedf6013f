"""Price of a target for the time of steps: how much longer a long prompt takes beside sequences that decode.

Steps of T seconds leave T - d to the prompt, d the seconds of the decodes alone, so it takes T / (T - d) times as long
as alone. Nothing is simulated.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.plan import StepPlan

CONTEXT_LEN = 1024  # tokens of each sequence that decodes, or the longest that the model takes


class TargetPrice(NamedTuple):
    """What a target costs beside a number of decodes."""

    num_decodes: int
    decode_s: float
    price: float | None  # None: the decodes alone take as long as the target

    def __str__(self) -> str:
        decodes = f"{self.num_decodes} decode{'s' if self.num_decodes > 1 else ''} of {self.decode_s * 1e3:.3g} ms"
        return f"{'target missed' if self.price is None else f'{self.price:.2f} x'} beside {decodes}"


def target_prices(
    step_s: Callable[[StepPlan], float], target_s: float, nums_decodes: Iterable[int], context_len: int
) -> list[TargetPrice]:
    """Return the prices of a target beside so many decodes, each with a context of `context_len` tokens.

    `step_s` returns the seconds of a plan.
    """
    prices = []
    for num in nums_decodes:
        rows = list(range(num))
        plan = StepPlan(rows=rows, starts=[context_len - 1] * num, counts=[1] * num, sample_rows=rows)
        decode_s = step_s(plan)
        prices.append(TargetPrice(num, decode_s, target_s / (target_s - decode_s) if decode_s < target_s else None))
    return prices
