"""Service of two clients with loads of 10 to 1, by scheduling policy, on a simulated GPU.

    python bench/fairness.py                     # a virtual clock: the figures are the same on every machine
    python bench/fairness.py --ratio 3 --rate 8

The light client alone asks for more than half of what the engine can serve, so its fair share is half. Jain's index of
the served tokens is 1 if both get the same, and 0.5 if one gets all.
"""

from typing import Annotated, get_args

import typer

from quire.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from quire_lab.sim.fairness import HEAVY, LIGHT, serve
from quire_lab.sim.hardware import PAGED_ATTENTION_FACTOR, CostModel, read_hardware
from quire_lab.sim.models import read_model

BLOCKS, SEQS, BUDGET, MAX_LEN = 8192, 64, 2048, 2048


def main(
    ratio: Annotated[int, typer.Option(help="the heavy client's load over that of the light one", min=1)] = 10,
    num_light: Annotated[int, typer.Option(help="requests of the light client", min=1)] = 100,
    rate: Annotated[float, typer.Option(help="of the light client, requests per second", min=0.01)] = 12.0,
    prompt_len: Annotated[int, typer.Option(help="tokens", min=1)] = 256,
    output_len: Annotated[int, typer.Option(help="tokens", min=1)] = 256,
    model: Annotated[str, typer.Option(help="as for `quire simulate`")] = "LLaMA-7B",
    hardware: Annotated[str, typer.Option(help="as for `quire simulate`")] = "A100-40GB",
) -> None:
    """Print a row for each policy."""
    cost = CostModel(read_model(model, "auto").spec, read_hardware(hardware), attention_factor=PAGED_ATTENTION_FACTOR)
    config = SchedulerConfig(SEQS, BUDGET, MAX_LEN)
    print(f"{model} on {hardware}, {prompt_len} + {output_len} tokens, {rate:g} and {ratio * rate:g} requests/s")
    print(f"{'policy':<10}{'Jain':>8}{LIGHT:>12}{HEAVY:>12}{'light waits s':>15}{'tokens/s':>10}")
    for policy in get_args(SchedulingPolicy):
        found = serve(cost, CacheConfig(BLOCKS), config, policy, ratio, num_light, rate, (prompt_len, output_len))
        tokens = found.tokens
        print(
            f"{policy:<10}{found.jain_index:>8.4f}{tokens[LIGHT]:>12}{tokens[HEAVY]:>12}"
            f"{found.light_queue_s:>15.1f}{found.tokens_per_s:>10.0f}"
        )


if __name__ == "__main__":
    typer.run(main)
