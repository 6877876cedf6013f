"""Blocks go out and come in, in every layer, and the worker knows how fast."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire.core.plan import BlockCopy, StepPlan
from quire.execution.swapper import Swapper
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.model.kv_cache import KVCache
from quire.model.loader import load_model
from support.on_tensors import tensors

NOWHERE = np.empty(0, np.int64)  # is written to


@pytest.fixture(params=["reference", "auto"])
def parts(request: pytest.FixtureRequest, demo_model: Path) -> tuple[KVCache, KVCache, BackEnd]:
    """A cache of random content, an empty swap space, and the back end."""
    back_end = choose_back_end(torch.device("cpu"), request.param)
    geometry = load_model(demo_model, back_end=back_end, dtype="float32").kv_geometry
    cache, space = (KVCache.allocate(geometry, num, 16, back_end) for num in (6, 4))
    for tensor in cache.tensors:
        torch.as_tensor(tensor).normal_()
    return cache, space, back_end


def test_what_went_out_comes_in_elsewhere(parts: tuple[KVCache, KVCache, BackEnd]) -> None:
    cache, space, back_end = parts
    swapper = Swapper(cache, space, back_end.copy_blocks)
    before = [tensor.clone() for tensor in tensors(cache.tensors)]
    assert swapper.move(StepPlan(swap_outs=[BlockCopy(1, 3), BlockCopy(4, 0)]), NOWHERE) > 0
    for tensor in tensors(cache.tensors):
        tensor[[1, 4]] = 0
    assert swapper.move(StepPlan(swap_ins=[BlockCopy(3, 5), BlockCopy(0, 1)]), NOWHERE) > 0
    for tensor, old in zip(tensors(cache.tensors), before, strict=True):
        assert torch.equal(tensor[[5, 1]], old[[1, 4]])
        assert torch.equal(tensor[[0, 2, 3]], old[[0, 2, 3]])


def test_block_may_go_out_and_be_overwritten_in_one_step(parts: tuple[KVCache, KVCache, BackEnd]) -> None:
    cache, space, back_end = parts
    swapper = Swapper(cache, space, back_end.copy_blocks)
    keys, spared = tensors(cache.keys[0]), tensors(space.keys[0])
    first, second = keys[1].clone(), keys[2].clone()
    swapper.move(StepPlan(swap_outs=[BlockCopy(1, 0)]), NOWHERE)
    swapper.move(StepPlan(swap_outs=[BlockCopy(2, 1)], swap_ins=[BlockCopy(0, 2)]), NOWHERE)
    assert torch.equal(spared[1], second)
    assert torch.equal(keys[2], first)


def test_rates_are_those_of_each_direction(parts: tuple[KVCache, KVCache, BackEnd]) -> None:
    cache, space, back_end = parts
    swapper = Swapper(cache, space, back_end.copy_blocks)
    assert swapper.move(StepPlan(), NOWHERE) == 0
    assert (swapper.out_rate.per_s, swapper.in_rate.per_s) == (None, None)
    seconds = swapper.move(StepPlan(swap_outs=[BlockCopy(0, 0), BlockCopy(1, 1)]), NOWHERE)
    assert swapper.out_rate.per_s == pytest.approx(2 / seconds)
    assert swapper.in_rate.per_s is None
