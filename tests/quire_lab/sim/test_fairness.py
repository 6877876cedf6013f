"""Served tokens of clients whose loads are 10 to 1."""

import pytest

from quire.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from quire_lab.sim.fairness import HEAVY, LIGHT, ServiceShares, serve
from quire_lab.sim.hardware import CostModel, read_hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.statistics import jain_index


def served(policy: SchedulingPolicy, num_blocks: int) -> ServiceShares:
    cost = CostModel(read_model("LLaMA-7B", "auto").spec, read_hardware("A100-40GB"))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048)
    cache = CacheConfig(num_blocks)
    return serve(cost, cache, config, policy, ratio=10, num_light=30, rate=20.0, lengths=(32, 24))


@pytest.mark.parametrize("num_blocks", [512, 24], ids=["no preemptions", "preemptions"])
def test_fair_policy_serves_equal_shares_under_a_load_of_10_to_1(num_blocks: int) -> None:
    fair, priority = served("fair", num_blocks), served("priority", num_blocks)
    assert fair.jain_index >= 0.95
    assert priority.jain_index < 0.65, "by arrival the service follows the load"
    assert fair.tokens[LIGHT] > 0.75 * fair.tokens[HEAVY]
    assert fair.light_queue_s < priority.light_queue_s
    assert fair.tokens_per_s == pytest.approx(priority.tokens_per_s, rel=0.02)


def test_jain_index() -> None:
    assert jain_index([3, 3, 3]) == 1.0
    assert jain_index([5, 0, 0, 0]) == 0.25
    assert jain_index([10, 1]) == pytest.approx(121 / 202)
    assert jain_index([]) == jain_index([0, 0]) == 1.0
