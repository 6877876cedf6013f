"""Service of clients with unequal loads on one simulated engine, by scheduling policy (Sheng et al. 2024, section 5).

The light client asks for more than its share, and the heavy ones for `ratio` times as much each.
The service of each while all of them have requests gives the equality of the shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from quire_lab.sim.hardware import CostModel
from quire_lab.sim.simulation import Answer, SimulatedRun, Simulation, paged_scheduler
from quire_lab.sim.statistics import jain_index
from quire_lab.sim.workloads import random_workload

LIGHT, HEAVY = "light", "heavy"


@dataclass(frozen=True, slots=True)
class ServiceShares:
    """Shares of service of the clients while all of them had requests. Tokens are those of prompts and answers."""

    tokens: dict[str, int]      # keyed by client
    light_queue_s: float        # mean, of the light client's requests
    tokens_per_s: float         # sum over all clients and the whole run

    @property
    def jain_index(self) -> float:
        """Equality of the shares, 1 if all are equal (Jain)."""
        return jain_index(list(self.tokens.values()))


def serve(
    cost: CostModel, cache: CacheConfig, config: SchedulerConfig, policy: SchedulingPolicy, ratio: int, num_light: int,
    rate: float, lengths: tuple[int, int], seed: int = 0,
) -> ServiceShares:  # fmt: skip
    """Serve `num_light` requests of the light client at `rate` per second, and `ratio` times both of the heavy one."""
    items, due_s = [], []
    for client, factor in ((HEAVY, ratio), (LIGHT, 1)):
        made = random_workload(num_light * factor, *lengths, cost.spec.vocab_size, seed + factor)
        items += [replace(item, client_id=client) for item in made]
        due_s += [number / (rate * factor) for number in range(len(made))]
    config = replace(config, scheduling_policy=policy)
    run = Simulation(paged_scheduler(cache, config), cost).run(items, due_s)
    end_s = min(_last_admission_s(run.answers, client) for client in (HEAVY, LIGHT))
    tokens = {client: _served(run, client, end_s) for client in (HEAVY, LIGHT)}
    light = [answer for answer in run.answers if answer.item.client_id == LIGHT]
    queue_s = sum((answer.admitted_s or 0.0) - answer.arrival_s for answer in light) / len(light)
    return ServiceShares(tokens, queue_s, run.tokens_per_s)


def _last_admission_s(answers: Sequence[Answer], client: str) -> float:
    admitted = [answer.admitted_s for answer in answers if answer.item.client_id == client]
    return max(each for each in admitted if each is not None)


def _served(run: SimulatedRun, client: str, end_s: float) -> int:
    """Return the prompt and output tokens of a client up to a moment; a prompt counts when it is admitted."""
    num_tokens = 0
    for answer in run.answers:
        if answer.item.client_id == client and answer.admitted_s is not None and answer.admitted_s <= end_s:
            num_tokens += len(answer.item.prompt_token_ids)
            num_tokens += sum(run.step_ends_s[step] <= end_s for step in answer.steps)
    return num_tokens
