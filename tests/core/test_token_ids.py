"""TokenIds: a list of token ids over a prompt that is shared."""

import random
from array import array
from struct import error as StructError

import pytest

from quire.core.token_ids import TokenIds, pack_tokens

PROMPT = [5, 6, 7]


def test_tokens_read_like_a_list_of_prompt_and_output() -> None:
    rng = random.Random(0)
    for num_prompt, num_output in ((1, 0), (3, 0), (3, 4), (5, 1)):
        known = [rng.randrange(1 << 31) for _ in range(num_prompt + num_output)]
        tokens = TokenIds(pack_tokens(known[:num_prompt]), known[num_prompt:])
        assert (len(tokens), list(tokens)) == (len(known), known)
        assert [tokens[i] for i in range(-len(known), len(known))] == known + known
        for start in range(-1, len(known) + 2):
            for stop in range(-1, len(known) + 2):
                assert tokens[start:stop] == array("i", known[start:stop])


@pytest.mark.parametrize("index", [3, -4])
def test_index_past_the_tokens_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        TokenIds(pack_tokens(PROMPT))[index]


def test_fork_shares_the_prompt_and_grows_by_itself() -> None:
    parent = TokenIds(pack_tokens(PROMPT), [8])
    child = parent.fork()
    child.append(9)
    parent.append(10)
    assert child.prompt is parent.prompt
    assert (parent, child) == ([5, 6, 7, 8, 10], [5, 6, 7, 8, 9])
    assert parent != child


def test_packed_tokens_are_not_packed_again() -> None:
    packed = pack_tokens(PROMPT)
    assert pack_tokens(packed) is packed
    assert pack_tokens(array("q", PROMPT)) == packed, "only those of 32 bits are as they shall be"


def test_token_that_needs_more_than_32_bits_is_refused() -> None:
    with pytest.raises(StructError):
        pack_tokens([1 << 31])
