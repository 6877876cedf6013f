"""What is let in can run alone, and what is refused could not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.block_table import worst_case_blocks
from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.scheduling.limits import AdmissionLimits

LIMITS = AdmissionLimits(num_blocks=10, block_size=16, max_num_seqs=4, max_model_len=100)

limits = st.builds(
    AdmissionLimits,
    num_blocks=st.integers(1, 40),
    block_size=st.integers(1, 20),
    max_num_seqs=st.integers(1, 8),
    max_model_len=st.integers(1, 200),
)
sizes = st.integers(1, 250)


def is_admissible(limits: AdmissionLimits, num_prompt_tokens: int, max_tokens: int, n: int) -> bool:
    try:
        limits.check_admissible(num_prompt_tokens, max_tokens, n)
    except InvalidRequestError:
        return False
    return True


@given(limits, sizes, sizes, st.integers(1, 10))
def test_request_is_let_in_exactly_if_it_fits_into_rows_length_and_pool(
    limits: AdmissionLimits, num_prompt_tokens: int, max_tokens: int, n: int
) -> None:
    fits = (
        n <= limits.max_num_seqs
        and num_prompt_tokens + max_tokens <= limits.max_model_len
        and worst_case_blocks(num_prompt_tokens, max_tokens, n, limits.block_size) <= limits.num_blocks
    )
    assert is_admissible(limits, num_prompt_tokens, max_tokens, n) == fits


@given(limits, sizes, st.integers(1, 8))
def test_most_tokens_are_let_in_and_one_more_is_not(limits: AdmissionLimits, num_prompt_tokens: int, n: int) -> None:
    most = limits.most_tokens(num_prompt_tokens, n)
    if n > limits.max_num_seqs:
        return
    assert not is_admissible(limits, num_prompt_tokens, max(1, most + 1), n)
    if most >= 1:
        assert is_admissible(limits, num_prompt_tokens, most, n)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "n", "most"), [(1, 1, 99), (40, 1, 60), (40, 4, 24), (99, 1, 1), (100, 1, 0), (120, 1, -20)]
)
def test_most_tokens_of_a_request(num_prompt_tokens: int, n: int, most: int) -> None:
    """With n of 4 and 40 tokens of prompt: 2 full blocks are shared, so each branch may own 2 of the other 8."""
    assert LIMITS.most_tokens(num_prompt_tokens, n) == most


def test_too_many_branches_are_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match=r"n is 5, but at most 4 .*max_num_seqs") as told:
        LIMITS.check_admissible(1, 1, 5)
    assert (told.value.param, told.value.code) == ("n", None)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "n", "told"),
    [
        (60, 41, 1, r"has 60 tokens and max_tokens is 41: together 101, .* 100 tokens \(max_model_len\)"),
        (101, 1, 1, r"101 tokens.* 100 tokens \(max_model_len\)"),
        (40, 25, 4, r"40 tokens with max_tokens 25 and n 4 may need 14 KV blocks of 16 .*are 10 \(num_kv_blocks\)"),
    ],
)
def test_too_long_a_request_is_refused_with_its_numbers(
    num_prompt_tokens: int, max_tokens: int, n: int, told: str
) -> None:
    with pytest.raises(ContextLengthError, match=told) as error:
        LIMITS.check_admissible(num_prompt_tokens, max_tokens, n)
    assert error.value.code == "context_length_exceeded"
