"""Several simulated engines: one is the simulation of one engine, and the router decides by what had ended."""

import random

import pytest

from quire.core.config import CacheConfig, SchedulerConfig
from quire.engine.fleet.router import Routing
from quire_lab.sim.models import set_up
from quire_lab.sim.simulation import FleetRun, FleetSimulation, Simulation, paged_scheduler
from quire_lab.sim.workloads import WorkItem

COST = set_up("OPT-13B").cost_model()
CACHE, CONFIG = CacheConfig(1000, 16), SchedulerConfig(64, 512, 2048, "recompute")


def conversations(num_chats: int, num_turns: int, seed: int = 0) -> tuple[list[WorkItem], list[float]]:
    """Return the requests of chats, which begin alike in groups, a second between two turns."""
    generator = random.Random(seed)
    items, due_s = list[WorkItem](), list[float]()
    for chat in range(num_chats):
        prompt = [chat % 3] * 64
        for turn in range(num_turns):
            prompt = prompt + [generator.randrange(1000) for _ in range(generator.randrange(10, 60))]
            items.append(WorkItem(prompt, 20))
            due_s.append(chat * 0.15 + turn * 2.0)
    return items, due_s


def run(num_engines: int, routing: Routing = "prefix", cache: CacheConfig = CACHE) -> tuple[FleetSimulation, FleetRun]:
    fleet = FleetSimulation(num_engines, cache, CONFIG, COST, routing)
    return fleet, fleet.run(*conversations(30, 4))


def test_one_engine_is_served_as_without_a_router() -> None:
    items, due_s = conversations(30, 4)
    alone = Simulation(paged_scheduler(CACHE, CONFIG), COST).run(items, due_s)
    _, fleet = run(1)
    assert fleet.whole == alone


@pytest.mark.parametrize("routing", ["prefix", "round-robin", "affinity"])
def test_every_request_is_answered_by_one_engine_and_none_is_left(routing: Routing) -> None:
    fleet, found = run(3, routing)
    assert len(found.whole.finished) == 120
    assert [answer.arrival_s for answer in found.whole.answers] == sorted(conversations(30, 4)[1])
    assert sum(len(each.answers) for each in found.engines) == 120
    fleet._deliver(float("inf"))
    assert list(fleet.router.num_pending) == [0, 0, 0]
    fleet.router.check()


def test_rule_keeps_prefixes_together_and_work_apart() -> None:
    _, alone = run(1, cache=CacheConfig(3000, 16))
    found = {rule: run(3, rule)[1] for rule in ("prefix", "round-robin")}
    whole = {rule: each.whole.hit_rate for rule, each in found.items()}
    assert whole["prefix"] > 0.95 * alone.whole.hit_rate
    assert whole["prefix"] > whole["round-robin"] + 0.1
    assert found["prefix"].imbalance < 1.15


def test_request_that_no_engine_can_run_is_refused_and_forgotten() -> None:
    fleet = FleetSimulation(2, CACHE, CONFIG, COST)
    found = fleet.run([WorkItem([1] * 3000, 5), WorkItem([2] * 20, 5)], [0.0, 0.0])
    assert (found.whole.num_refused, len(found.whole.finished)) == (1, 1)


def test_report_is_delivered_when_its_step_has_ended() -> None:
    fleet = FleetSimulation(2, CACHE, CONFIG, COST)
    seen: list[list[int]] = []
    route = fleet.router.route

    def look(request: object) -> int:
        seen.append(list(fleet.router.num_pending))
        return route(request)  # type: ignore[arg-type]

    fleet.router.route = look  # type: ignore[method-assign,assignment]
    fleet.run([WorkItem([1] * 100, 5), WorkItem([2] * 100, 5), WorkItem([3] * 10, 1)], [0.0, 1e-6, 1e6])
    assert seen == [[0, 0], [100, 0], [0, 0]]
