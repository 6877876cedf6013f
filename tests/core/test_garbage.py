"""Pauses of the garbage collector, and objects that it leaves alone meanwhile."""

import gc

import pytest

from quire.core import garbage
from quire.core.garbage import collections_paused, older_objects_frozen


@pytest.mark.parametrize("collects", [True, False])
def test_collector_is_as_before_after_a_pause(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with collections_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_objects_of_a_pause_are_in_the_oldest_generation_and_not_frozen() -> None:
    gc.unfreeze()
    with collections_paused():
        made = [[] for _ in range(3)]
    if gc.isenabled():
        assert any(each is made[0] for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_collections_see_only_what_is_made_after_older_objects_were_frozen() -> None:
    gc.unfreeze()
    older = [[] for _ in range(3)]
    with older_objects_frozen():
        made = [[] for _ in range(3)]
        seen = {id(each) for each in gc.get_objects()}
        assert {id(each) for each in made} <= seen
        assert seen.isdisjoint(map(id, older))
        with older_objects_frozen():
            pass
        assert gc.get_freeze_count(), "the inner one leaves the outer one's objects alone"
    assert gc.get_freeze_count() == 0


def test_frozen_objects_are_not_counted_again_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count takes as long as a collection, and a call of `LLM` would make two."""
    gc.unfreeze()
    with older_objects_frozen(), monkeypatch.context() as patched:
        patched.setattr(garbage, "gc", None)
        with older_objects_frozen():
            pass
    assert gc.get_freeze_count() == 0
