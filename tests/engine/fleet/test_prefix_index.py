"""The index of an engine's prefixes: exact matches by scope, and eviction in the engine's order."""

import random

import pytest

from quire.core.pooling import Scope
from quire.engine.fleet.router import PrefixIndex

SCOPE, OTHER = Scope(), Scope(salt="mine")


def test_match_is_exact_to_the_block_and_stays_in_its_scope() -> None:
    index = PrefixIndex(num_blocks=16, block_size=4)
    index.add(SCOPE, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert index.match(SCOPE, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert index.match(SCOPE, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 4
    assert index.match(SCOPE, [0, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert index.match(OTHER, [1, 2, 3, 4, 5, 6, 7, 8]) == 0


def test_least_recently_used_leaf_is_evicted_first() -> None:
    index = PrefixIndex(num_blocks=3, block_size=1)
    index.add(SCOPE, [1, 2])
    index.add(SCOPE, [3])
    index.evict(1)
    assert (index.match(SCOPE, [1, 2]), index.match(SCOPE, [3])) == (1, 1)
    index.add(SCOPE, [1])
    index.evict(2)
    assert (index.match(SCOPE, [1]), index.match(SCOPE, [3])) == (1, 0)
    index.evict(9)
    assert len(index) == 0


def test_full_index_evicts_what_it_needs_and_never_the_sequence_itself() -> None:
    index = PrefixIndex(num_blocks=4, block_size=1)
    index.add(SCOPE, [1, 2, 3])
    index.add(SCOPE, [1, 4, 5])
    assert index.match(SCOPE, [1, 4, 5]) == 3
    assert index.match(SCOPE, [1, 2, 3]) == 2
    index.add(SCOPE, [6, 7, 8, 9, 10, 11])      # more than there are blocks
    assert index.match(SCOPE, [6, 7, 8, 9, 10, 11]) == 4
    index.check()


def test_what_the_index_evicted_for_want_of_room_is_not_evicted_again_when_the_engine_does() -> None:
    index = PrefixIndex(num_blocks=3, block_size=1)
    index.add(SCOPE, [1, 2, 3])
    index.add(SCOPE, [4, 5])
    index.evict(2)
    assert (index.match(SCOPE, [1, 2, 3]), index.match(SCOPE, [4, 5])) == (1, 2)
    index.evict(3)
    assert (index.match(SCOPE, [1, 2, 3]), index.match(SCOPE, [4, 5])) == (0, 2)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_matches_a_list_of_prefixes(seed: int) -> None:
    """With room for all, a match is the longest common beginning in whole blocks; with less, never longer."""
    generator, scopes = random.Random(seed), (SCOPE, OTHER)
    roomy, small = PrefixIndex(4096, 2), PrefixIndex(24, 2)
    seen: list[tuple[Scope, list[int]]] = []
    num_evicted = 0
    for _ in range(150):
        scope, tokens = generator.choice(scopes), [generator.randrange(2) for _ in range(generator.randrange(1, 24))]
        common = (_common(tokens, other) for known, other in seen if known == scope)
        assert roomy.match(scope, tokens) == max(common, default=0)
        assert small.match(scope, tokens) <= roomy.match(scope, tokens)
        for index in (roomy, small):
            index.add(scope, tokens)
            index.check()
        if generator.random() < 0.2:
            num_evicted += generator.randrange(4)
            small.evict(num_evicted)
            small.check()
        seen.append((scope, tokens))


def _common(left: list[int], right: list[int]) -> int:
    """Return the length of the common beginning in whole blocks of 2."""
    length = min(len(left), len(right)) // 2 * 2
    return next((start for start in range(0, length, 2) if left[start : start + 2] != right[start : start + 2]), length)


class SlowIndex:
    """Beginnings of sequences in whole blocks of 2, each with its last use; that used the longest ago is evicted."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks, self._num_uses = num_blocks, 0
        self._last_uses = dict[tuple[Scope, tuple[int, ...]], int]()

    def match(self, scope: Scope, tokens: list[int]) -> int:
        return 2 * sum(beginning in self._last_uses for beginning in self._beginnings(scope, tokens))

    def add(self, scope: Scope, tokens: list[int]) -> None:
        wanted = self._beginnings(scope, tokens)
        others = sorted(self._last_uses.keys() - set(wanted), key=self._last_uses.__getitem__)
        num_missing = sum(beginning not in self._last_uses for beginning in wanted)
        for beginning in others[: max(0, len(self._last_uses) + num_missing - self._num_blocks)]:
            del self._last_uses[beginning]
        num_found = len(wanted) - num_missing
        for beginning in reversed(wanted[: num_found + self._num_blocks - len(self._last_uses)]):
            self._num_uses += 1
            self._last_uses[beginning] = self._num_uses

    def _beginnings(self, scope: Scope, tokens: list[int]) -> list[tuple[Scope, tuple[int, ...]]]:
        return [(scope, tuple(tokens[:stop])) for stop in range(2, len(tokens) + 1, 2)]


@pytest.mark.parametrize("num_blocks", [3, 24, 60])
def test_random_use_evicts_what_was_used_the_longest_ago(num_blocks: int) -> None:
    generator, index, slow = random.Random(num_blocks), PrefixIndex(num_blocks, 2), SlowIndex(num_blocks)
    seen: list[tuple[Scope, list[int]]] = []
    for _ in range(150):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 24))]
        seen.append((generator.choice((SCOPE, OTHER)), tokens))
        index.add(*seen[-1])
        slow.add(*seen[-1])
        index.check()
        assert [index.match(*each) for each in seen] == [slow.match(*each) for each in seen]
