"""Figure 9 of Kwon et al. 2023, and a prompt that four beams share, by a search in the scheduler's own step.

`test_paper_figures.py` plays the same with the cache's verbs alone.
"""

from dataclasses import replace

import pytest

from quire.core.sampling_params import BeamSearchParams
from support.fake_executor import VOCAB_SIZE
from support.scheduling import Harness

PROMPT = [40, 41, 42, 43]           # one block of four
NEVER = -1000.0


def figure_nine(token_ids: list[int]) -> list[float]:
    """Logprobs that grow the tree of figure 9: the first token tells X (1) from Y (2); both go on with tokens 0.

    Behind block 3 three beams branch off X; Y stays alone. Behind the fourth block beams 1 and 2 survive, twice each.
    """
    likely: dict[int, float] = {}
    first, middle, last = token_ids[4:5], token_ids[5:12], token_ids[12:13]
    position = len(token_ids)
    if position == 4:
        likely = {1: -0.1, 2: -0.2, 3: -3.0, 4: -4.0}
    elif first in ([1], [2]) and not any(middle):
        branches = {0: 0.0, 9: -1.0} if position < 12 else {5: 0.0, 6: -0.1, 7: -0.2} if first == [1] else {8: 0.0}
        later = {1: 0.0, 2: -0.1} if last in ([6], [7]) else {}
        likely = branches if position <= 12 else later if position == 16 else {0: 0.0}
    return [likely.get(token, NEVER - token) for token in range(VOCAB_SIZE)]


def harness_of(num_blocks: int, *, caching: bool = False) -> Harness:
    """A pool that may be smaller than what four beams could need if they shared nothing."""
    harness = Harness(num_blocks, block_size=4, caching=caching)
    harness.executor.next_logprobs = figure_nine
    harness.scheduler.limits = replace(harness.scheduler.limits, num_blocks=100)
    return harness


def tables(harness: Harness) -> list[list[int]]:
    """The block tables of the beams, in the order in which they branched off: X's three, then Y's."""
    (request,) = harness.scheduler.queues.running
    beams = sorted(request.live, key=lambda beam: beam.token_ids[4:])
    return [harness.cache.block_ids(beam.seq_id) for beam in beams]


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("num_blocks", [9, 32])
def test_p9_nine_blocks_suffice_for_four_beams_and_nothing_is_copied(num_blocks: int, caching: bool) -> None:
    harness = harness_of(num_blocks, caching=caching)
    request = harness.add_beams(PROMPT, BeamSearchParams(4, 15))
    while len(request.live[0].token_ids) < 16 + 1:
        harness.step()
        assert harness.cache.stats().used_blocks <= 9

    survived = tables(harness)
    blocks_6_and_7 = [survived[0][3], survived[2][3]]
    assert survived[0] == survived[1]
    assert survived[2] == survived[3]
    assert survived[0][:3] == survived[2][:3]
    owners = {block: sum(block in table for table in survived) for table in survived for block in table}
    assert owners == dict.fromkeys(survived[0][:3], 4) | dict.fromkeys(blocks_6_and_7, 2)
    assert harness.cache.stats().used_blocks == 5, "blocks 2, 4, 5 and 8 are free"
    num_copied = harness.cache.stats().copied_blocks

    harness.step()
    grown = tables(harness)
    stats = harness.cache.stats()
    assert [table[:4] for table in grown] == survived
    assert len({table[4] for table in grown}) == 4
    assert (stats.used_blocks, sum(map(len, grown)), stats.copied_blocks - num_copied) == (9, 20, 0)
    assert stats.ref_counts == {"1": 4, "2": 2, "3-4": 3, "5-8": 0, "9+": 0}
    harness.run()
    harness.assert_right(request)
    assert request.num_preemptions == 0


def test_p9_before_the_survivors_are_chosen() -> None:
    """[0,1,3,5] [0,1,3,6] [0,1,3,7] [0,2,4,8], as the figure has it: 9 blocks, of 16 without sharing."""
    harness = harness_of(9)
    request = harness.add_beams(PROMPT, BeamSearchParams(4, 15))
    while len(request.live[0].token_ids) < 16:
        harness.step()
    x5, x6, x7, y = tables(harness)
    assert x5[:3] == x6[:3] == x7[:3]
    assert y[0] == x5[0]
    assert not set(y[1:]) & {*x5, *x6, *x7}
    stats = harness.cache.stats()
    assert (stats.used_blocks, sum(map(len, (x5, x6, x7, y)))) == (9, 16)
    assert stats.ref_counts == {"1": 6, "2": 0, "3-4": 3, "5-8": 0, "9+": 0}


def test_t8_a_prompt_of_256_tokens_is_stored_once_for_four_beams() -> None:
    harness = Harness(num_blocks=128, block_size=16, budget=256)
    request = harness.add_beams(256, BeamSearchParams(4, 20))
    harness.step()
    assert len(harness.executor.trace[-1][4]) == 1, "one row of logits for the first choice"
    assert harness.cache.stats().used_blocks == 16
    assert sum(map(len, tables(harness))) == 64
    while harness.scheduler.has_requests:
        stats = harness.cache.stats()
        assert stats.used_blocks <= 16 + 4 * 2
        assert stats.shared_blocks >= 16
        harness.step()
    harness.assert_right(request)
