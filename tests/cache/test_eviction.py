"""LeastRecentlyUsed: the order in which cached blocks go."""

from quire.cache.eviction import LeastRecentlyUsed


def test_block_let_go_first_is_given_up_first() -> None:
    cached = LeastRecentlyUsed()
    for block in (5, 2, 9):
        cached.add(block)
    assert (cached.first(), len(cached), 2 in cached, 3 in cached) == (5, 3, True, False)
    cached.remove(5)
    assert cached.first() == 2


def test_block_that_is_used_again_goes_to_the_end() -> None:
    cached = LeastRecentlyUsed()
    cached.add(5)
    cached.add(2)
    cached.remove(5)
    cached.add(5)
    assert cached.first() == 2
