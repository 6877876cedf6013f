"""Holders of blocks: labels and requests over the cache's numbers of sequences."""

import random
from functools import partial

from quire.core.block_map import BlockHolder
from quire.engine.engine import Engine, count_blocks_by_owner
from support.scheduling import Harness, make_disk
from support.scripted_store import ScriptedStore


def test_map_names_request_branch_and_label_of_every_holder() -> None:
    harness = Harness(num_blocks=12, block_size=4)
    engine = Engine(harness.scheduler, harness.executor)
    first = harness.add(6, n=2, max_tokens=9)
    first.owner = "key-1"
    harness.add(3, max_tokens=9)
    engine.step()
    shown = engine.block_map(0, 100)
    assert [entry.block for entry in shown.blocks] == list(range(12))
    assert (shown.first, shown.stats.used_blocks, shown.stats.num_sequences) == (0, 3, 3)
    assert shown.holders == [
        BlockHolder(0, "sequence", 6, 0, 0, "key-1"),
        BlockHolder(1, "sequence", 6, 0, 1, "key-1"),
        BlockHolder(2, "sequence", 3, 1, 0, ""),
    ]
    assert {owner.holder for entry in shown.blocks for owner in entry.owners} == {0, 1, 2}
    tail = engine.block_map(2, 1)                       # where the second request is
    assert [holder.holder for holder in tail.holders] == [2]


def test_pin_is_shown_too() -> None:
    harness = Harness(num_blocks=12, block_size=4, caching=True, max_model_len=24)
    harness.add(3, max_tokens=1)
    pinned = harness.pin([1, 2, 3, 4, 5])
    harness.run()
    shown = Engine(harness.scheduler, harness.executor).block_map(0, 12)
    assert shown.holders == [BlockHolder(-1 - pinned.request_id, "pin", 5, pinned.request_id)]


def test_lease_of_a_load_is_shown_by_its_request() -> None:
    store = ScriptedStore(20, random.Random(0), most_turns=0)
    for is_loading in (False, True):
        harness = Harness(num_blocks=12, block_size=4, caching=True, make_disk=partial(make_disk, store=store))
        assert harness.disk is not None
        request = harness.add(list(range(9)), max_tokens=1)
        if is_loading:
            harness.schedule()                              # nothing else is here: it loads, and waits
            shown = Engine(harness.scheduler, harness.executor).block_map(0, 12)
            assert shown.holders == [BlockHolder(-1 - request.request_id, "lease", 8, request.request_id)]
        harness.run()
        harness.disk.drain(1.0)


def test_swapped_request_is_shown_where_it_is() -> None:
    harness = Harness(num_blocks=12, block_size=4, num_swap_blocks=20, mode="swap")
    engine = Engine(harness.scheduler, harness.executor)
    harness.add(7, max_tokens=24, ignore_eos=True)
    away = harness.add(6, n=2, max_tokens=16, ignore_eos=True)
    away.owner = "key-1"
    while away not in harness.scheduler.queues.swapped:
        harness.step()
    num_tokens = away.live[0].num_computed_tokens
    shown = engine.block_map(0, 20, "swap")
    assert shown.holders == [BlockHolder(1, "sequence", num_tokens, 1, 0, "key-1"),
                             BlockHolder(2, "sequence", num_tokens, 1, 1, "key-1")]  # fmt: skip
    assert [holder.holder for holder in engine.block_map(0, 12).holders] == [0]
    assert sum(entry.state == "used" for entry in shown.blocks) == shown.stats.swap_used_blocks > 0
    harness.run()
    after = engine.block_map(0, 20, "swap")
    assert (after.holders, {entry.state for entry in after.blocks}) == ([], {"free"})


def test_blocks_are_counted_once_for_each_label() -> None:
    harness = Harness(num_blocks=30, block_size=4, caching=True)
    prompt = list(range(9))
    for owner in ("key-1", "key-1", "key-2", ""):
        harness.add(prompt, max_tokens=20).owner = owner
        harness.step()                                  # two blocks of each prompt are one and the same
    assert count_blocks_by_owner(harness.scheduler) == {"key-1": 4, "key-2": 3}
    assert Engine(harness.scheduler, harness.executor).kv_stats(by_owner=False).blocks_by_owner is None
    harness.run()
    assert count_blocks_by_owner(harness.scheduler) == {}
