"""Victims of preemption and their return; what is reserved without paging (Kwon et al. 2023, 4.5 and 6.1)."""

from typing import get_args

from quire.core.config import MemoryPolicy
from quire_lab.baselines.buddy_pool import num_reserved_tokens
from support.scheduling import Harness

ORCAS = get_args(MemoryPolicy)[1:]


def test_p_recompute_one_prefill_of_prompt_and_generated_tokens() -> None:
    """The latest arrival gives way: 7 tokens of prompt and 3 generated ones come back as one prefill of 10."""
    harness = Harness(num_blocks=10, block_size=2)
    first, victim = (harness.add(7, max_tokens=8, ignore_eos=True) for _ in range(2))
    while harness.scheduler.has_requests and not victim.num_preemptions:
        harness.step()
    assert (victim.live[0].num_prompt_tokens, victim.live[0].num_output_tokens) == (7, 3)
    assert first.num_preemptions == 0
    while harness.scheduler.has_requests and victim not in harness.scheduler.queues.running:
        harness.step()
    assert 10 in harness.executor.trace[-1][2]
    harness.run()
    for request in (first, victim):
        harness.assert_right(request)


def test_p_orca_pow2_reserves_32_for_an_output_of_25() -> None:
    assert num_reserved_tokens("contiguous-pow2", 100, 25, 2048) - 100 == 32


def test_p_orca_a_chat_prompt_of_1024_takes_the_chunk_of_2048_in_all_three() -> None:
    for output_len in range(1, 1025):
        reserved = [num_reserved_tokens(policy, 1024, output_len, 2048) for policy in ORCAS]
        assert {1 << (num_tokens - 1).bit_length() for num_tokens in reserved} == {2048}
