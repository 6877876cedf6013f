"""Suffix drafts: chosen by frequency, from the row and from recent outputs of the same scope only.

All tests are run with the lookup in C++ and with its plain form.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire.core.plan import NewRow
from quire.core.pooling import NO_SCOPE, Scope
from quire.core.sampling_params import SamplingParams
from quire.core.speculation import parse_speculation
from quire.execution.batch import PersistentBatch
from quire.execution.drafting.drafters import make_lookup
from quire.execution.drafting.lookups import GAP, RULES, RecentOutputs
from quire.extension.isas import usable_isas

PHRASE = list(range(100, 140))


class Rows:
    """Rows of a lookup with given tokens."""

    def __init__(self, is_native: bool, num_rows: int = 4, length: int = 600, most: int = 16) -> None:
        batch = PersistentBatch(num_rows, length, 16, 1000)
        config = parse_speculation("", "suffix", num_speculative_tokens=most)
        assert config is not None
        self.token_ids, self.lookup = batch.token_ids, make_lookup(config, batch, is_native=is_native)

    def begin(self, row: int, tokens: Sequence[int], num_prompt: int = 1, scope: Scope = NO_SCOPE) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        self.lookup.reset(NewRow(row, list(tokens), num_prompt, [], SamplingParams(), 0, scope=scope))

    def draft(self, *tokens: Sequence[int]) -> list[list[int]]:
        """Return the drafts of rows 0, 1, ..., with these tokens."""
        for row, each in enumerate(tokens):
            self.token_ids[row, : len(each)] = each
        last = np.array([len(each) - 1 for each in tokens])
        found = self.lookup.draft(np.arange(len(tokens)), last)
        return [list(found.get(row, ())) for row in range(len(tokens))]


@pytest.fixture(params=["C++", "plain"])
def rows_of(request: pytest.FixtureRequest) -> Callable[..., Rows]:
    if request.param == "C++" and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    return lambda **sizes: Rows(request.param == "C++", **sizes)


def test_nothing_is_drafted_where_nothing_recurs(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of()
    rows.begin(0, [5, 6, 7])
    assert rows.draft([5, 6, 7]) == [[]]
    assert rows.draft([5]) == [[]]
    assert rows.draft([5, 6, 7, 7, 5]) == [[]]      # one token alone is too little
    rows.begin(0, [1])
    assert rows.draft([1, 2, 8, 9, 1, 2]) == [[8, 9]]


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_draft_has_at_most_as_many_tokens_as_the_run_that_was_found(limit: int, rows_of: Callable[..., Rows]) -> None:
    rows = rows_of(most=limit)
    tokens = [*PHRASE[:10], 9, 9, *PHRASE[:4]]
    rows.begin(0, tokens)
    assert rows.draft(tokens) == [PHRASE[4 : 4 + min(limit, 4)]]


def test_most_frequent_continuation_wins_and_the_latest_of_equal_ones(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of()
    first, second, third = [1, 2, 3, 8], [1, 2, 3, 4], [1, 2, 3, 5]
    for tokens, token in (
        ([*second, 60, *first, 61, *second, 62, 1, 2, 3], 4),
        ([*second, 60, *first, 61, *third, 62, 1, 2, 3], 5),
        ([*second, 60, *first, 61, 9, 1, 2, 3, 63, 9, 1, 2, 3], 63),     # a longer run
    ):
        rows.begin(0, tokens)
        assert rows.draft(tokens)[0][:1] == [token]


@pytest.mark.parametrize(("num_places", "draft"), [(4, [7, 53, 1]), (10, [7, 59, 1]), (11, [7])])
def test_draft_ends_where_fewer_than_a_tenth_of_the_places_agree(
    num_places: int, draft: list[int], rows_of: Callable[..., Rows]
) -> None:
    rows = rows_of()
    tokens = [each for last in range(50, 50 + num_places) for each in (1, 2, 3, 7, last)] + [1, 2, 3]
    rows.begin(0, tokens)
    assert rows.draft(tokens) == [draft]


def test_recent_outputs_of_other_rows_are_drafted(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of()
    rows.begin(0, [1])
    rows.begin(1, [2])
    assert rows.draft([1, *PHRASE], [2]) == [[], []]
    assert rows.draft([1, *PHRASE, 3], [2, *PHRASE[20:30]])[1] == PHRASE[30:40]
    rows.begin(2, [9, *PHRASE[5:9]], num_prompt=5)              # at the end of a prompt, too
    assert rows.draft([1, *PHRASE, 3], [2], [9, *PHRASE[5:9]])[2] == PHRASE[9:13]


def test_prompts_and_resumed_outputs_are_not_added(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of()
    rows.begin(0, PHRASE, num_prompt=len(PHRASE))
    rows.begin(1, [7, *PHRASE[::-1]], num_prompt=1)             # with what it put out before a preemption
    assert rows.draft(PHRASE, [7, *PHRASE[::-1]]) == [[], []]
    rows.begin(2, [8], num_prompt=1)
    for part in (PHRASE[:6], PHRASE[:6:-1]):
        assert rows.draft(PHRASE, [7, *PHRASE[::-1]], [8, *part]) == [[], [], []]


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [(Scope("salt"), True), (Scope("pepper"), False), (NO_SCOPE, False), (Scope("salt", "adapter"), False)],
    ids=str,
)
def test_nothing_is_drafted_from_outputs_of_another_scope(
    other: Scope, is_shared: bool, rows_of: Callable[..., Rows]
) -> None:
    rows = rows_of()
    rows.begin(0, [1], scope=Scope("salt"))
    rows.draft([1, *PHRASE])
    rows.begin(1, [2], scope=other)
    assert rows.draft([1, *PHRASE], [2, *PHRASE[:6]])[1] == (PHRASE[6:12] if is_shared else [])
    rows.begin(0, [1], scope=other)                             # the row itself, when it has another owner
    assert rows.draft([3, *PHRASE[:6]])[0] == (PHRASE[6:12] if is_shared else [])


def test_runs_are_found_across_chunks_of_an_output(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of()
    rows.begin(0, [1])
    for length in range(1, len(PHRASE) + 1):
        rows.draft([1, *PHRASE[:length]])
    rows.begin(1, [2])
    for end in range(4, 2 * RULES.chunk - 1):
        found = rows.draft([1], [2, *PHRASE[end - 4 : end]])[1]
        assert found
        assert found == PHRASE[end : end + len(found)]


@pytest.mark.parametrize(("num_tokens", "owner"), [(9, Scope("a")), (9, Scope("b")), (19, Scope("a"))], ids=str)
def test_end_of_an_output_is_added_when_its_row_has_another_owner(
    num_tokens: int, owner: Scope, rows_of: Callable[..., Rows]
) -> None:
    rows = rows_of()
    rows.begin(0, [1], scope=Scope("a"))
    rows.begin(1, [2], scope=Scope("a"))
    for length in range(1, num_tokens + 1):
        rows.draft([1, *PHRASE[:length]])
    end = PHRASE[num_tokens - 4 : num_tokens]
    assert rows.draft([1, *PHRASE[:num_tokens]], [2, *end[:3]])[1] == []
    rows.begin(0, [3, *PHRASE[20:30]], scope=owner)
    assert rows.draft([3], [2, *end[:3]])[1] == end[3:]
    assert rows.draft([3], [2, *PHRASE[20:23]])[1] == []        # the new owner's prompt


def test_text_keeps_the_latest_half_when_it_is_full() -> None:
    rng = np.random.default_rng(3)
    text = RecentOutputs(RULES.max_text)
    chunks = [rng.integers(0, 50_000, rng.integers(2, 99), dtype=np.int32) for _ in range(2000)]
    for chunk in chunks:
        text.add(chunk)
        assert len(text.tokens) <= RULES.max_text
    kept = np.concatenate([np.append(chunk, np.int32(GAP)) for chunk in chunks])[-len(text.tokens) :]
    assert (text.tokens == kept).all()
    assert len(kept) >= RULES.max_text // 2 - 100


def test_texts_are_bounded_and_the_scope_used_last_stays(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of(num_rows=1)
    for number in range(RULES.num_texts + 9):
        rows.begin(0, [1], scope=Scope(str(number)))
        rows.draft([1, *PHRASE])
        rows.begin(0, [1], scope=Scope("0"))
    for scope, is_kept in (("0", True), ("10", True), (str(RULES.num_texts + 8), True), ("9", False)):
        rows.begin(0, [1], scope=Scope(scope))
        assert rows.draft([2, *PHRASE[:5]]) == [PHRASE[5:10] if is_kept else []], scope


def test_rows_of_a_scope_without_a_text_draft_from_themselves(rows_of: Callable[..., Rows]) -> None:
    rows = rows_of(num_rows=2)
    rows.begin(1, [2], scope=Scope("first"))
    for number in range(RULES.num_texts):
        rows.begin(0, [1], scope=Scope(str(number)))
    known = [2, *PHRASE, 3, *PHRASE[:5]]
    assert rows.draft([1], known) == [[], PHRASE[5:10]]
    assert rows.draft([1, *PHRASE[:5]], known)[0] == []     # nothing of it is in another scope's text


def test_draft_is_never_longer_than_its_limit_and_never_has_a_gap(rows_of: Callable[..., Rows]) -> None:
    rows, rng = rows_of(num_rows=3, length=2000, most=5), np.random.default_rng(7)
    tokens = [rng.integers(0, 4, 2000).tolist() for _ in range(3)]
    for row in range(3):
        rows.begin(row, tokens[row][:1])
    num_drafted = 0
    for length in range(1, 2000, 3):
        for draft in rows.draft(*(each[:length] for each in tokens)):
            assert len(draft) <= min(5, 2000 - length)
            assert GAP not in draft
            num_drafted += len(draft)
    assert num_drafted > 2000
