"""Pauses of the garbage collector."""

import gc

import pytest

from quire.core.garbage import collections_paused


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
