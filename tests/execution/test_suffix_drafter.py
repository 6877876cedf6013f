"""Suffix drafts: chosen by frequency, from the row and from recent outputs of the same scope only."""

from collections.abc import Sequence

import numpy as np
import pytest

from quire.core.plan import NewRow, StepPlan
from quire.core.sampling_params import SamplingParams
from quire.core.task import NO_SCOPE, Scope
from quire.execution.drafter import DraftRows
from quire.execution.drafting import suffix
from quire.execution.drafting.pairs import pair_hash
from quire.execution.drafting.suffix import CHUNK, GAP, MAX_SCOPES, MAX_TEXT, RecentOutputs, SuffixDrafter

PHRASE = list(range(100, 140))


class Rows:
    """Rows of a drafter with given tokens."""

    def __init__(self, num_rows: int = 4, length: int = 600) -> None:
        self.token_ids = np.zeros((num_rows, length), dtype=np.int32)
        self.drafter = SuffixDrafter(self.token_ids)

    def begin(self, row: int, tokens: Sequence[int], num_prompt: int = 1, scope: Scope = NO_SCOPE) -> None:
        self.token_ids[row, : len(tokens)] = tokens
        new = NewRow(row, list(tokens), num_prompt, [], SamplingParams(), 0, scope=scope)
        self.drafter.apply(StepPlan(new_rows=[new]))

    def draft(self, *tokens: Sequence[int], limit: int = 16) -> list[list[int]]:
        """Return the drafts of rows 0, 1, ..., with these tokens."""
        for row, each in enumerate(tokens):
            self.token_ids[row, : len(each)] = each
        lengths = np.array([len(each) for each in tokens])
        rows = DraftRows(np.arange(len(tokens)), lengths, lengths - 1, np.full(len(tokens), limit))
        found = self.drafter.draft(rows)
        return [list(found.get(row, ())) for row in range(len(tokens))]


def test_nothing_is_drafted_where_nothing_recurs() -> None:
    rows = Rows()
    rows.begin(0, [5, 6, 7])
    assert rows.draft([5, 6, 7]) == [[]]
    assert rows.draft([5]) == [[]]
    assert rows.draft([5, 6, 7, 7, 5]) == [[]]      # one token alone is too little
    rows.begin(0, [1])
    assert rows.draft([1, 2, 8, 9, 1, 2]) == [[8, 9]]


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_draft_has_at_most_as_many_tokens_as_the_run_that_was_found(limit: int) -> None:
    rows = Rows()
    tokens = [*PHRASE[:10], 9, 9, *PHRASE[:4]]
    rows.begin(0, tokens)
    assert rows.draft(tokens, limit=limit) == [PHRASE[4 : 4 + min(limit, 4)]]


def test_most_frequent_continuation_wins_and_the_latest_of_equal_ones() -> None:
    rows = Rows()
    first, second, third = [1, 2, 3, 8], [1, 2, 3, 4], [1, 2, 3, 5]
    rows.begin(0, first)
    assert rows.draft([*second, 60, *first, 61, *second, 62, 1, 2, 3])[0][:1] == [4]
    assert rows.draft([*second, 60, *first, 61, *third, 62, 1, 2, 3])[0][:1] == [5]
    assert rows.draft([*second, 60, *first, 61, 9, 1, 2, 3, 63, 9, 1, 2, 3])[0][:1] == [63]    # a longer run


def test_draft_ends_where_places_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    tokens = [each for last in range(50, 54) for each in (1, 2, 3, 7, last)] + [1, 2, 3]
    rows.begin(0, tokens)
    assert rows.draft(tokens) == [[7, 53, 1]]
    monkeypatch.setattr(suffix, "MIN_SHARE", 0.3)
    assert rows.draft(tokens) == [[7]]


def test_recent_outputs_of_other_rows_are_drafted() -> None:
    rows = Rows()
    rows.begin(0, [1])
    rows.begin(1, [2])
    assert rows.draft([1, *PHRASE], [2]) == [[], []]
    assert rows.draft([1, *PHRASE, 3], [2, *PHRASE[20:30]])[1] == PHRASE[30:40]
    rows.begin(2, [9, *PHRASE[5:9]], num_prompt=5)              # at the end of a prompt, too
    assert rows.draft([1, *PHRASE, 3], [2], [9, *PHRASE[5:9]])[2] == PHRASE[9:13]


def test_prompts_and_resumed_outputs_are_not_added() -> None:
    rows = Rows()
    rows.begin(0, PHRASE, num_prompt=len(PHRASE))
    rows.begin(1, [7, *PHRASE[::-1]], num_prompt=1)             # with what it put out before a preemption
    assert rows.draft(PHRASE, [7, *PHRASE[::-1]]) == [[], []]
    assert not rows.drafter._texts


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [(Scope("salt"), True), (Scope("pepper"), False), (NO_SCOPE, False), (Scope("salt", "adapter"), False)],
    ids=str,
)
def test_nothing_is_drafted_from_outputs_of_another_scope(other: Scope, is_shared: bool) -> None:
    rows = Rows()
    rows.begin(0, [1], scope=Scope("salt"))
    rows.draft([1, *PHRASE])
    rows.begin(1, [2], scope=other)
    assert rows.draft([1, *PHRASE], [2, *PHRASE[:6]])[1] == (PHRASE[6:12] if is_shared else [])
    rows.begin(0, [1], scope=other)                             # the row itself, when it has another owner
    assert rows.draft([3, *PHRASE[:6]])[0] == (PHRASE[6:12] if is_shared else [])


def test_runs_are_found_across_chunks_of_an_output() -> None:
    rows = Rows()
    rows.begin(0, [1])
    for length in range(1, len(PHRASE) + 1):
        rows.draft([1, *PHRASE[:length]])
    rows.begin(1, [2])
    for end in range(4, 2 * CHUNK - 1):
        found = rows.draft([1], [2, *PHRASE[end - 4 : end]])[1]
        assert found
        assert found == PHRASE[end : end + len(found)]


def test_text_keeps_the_latest_half_when_it_is_full() -> None:
    has_pair, rng = np.ones(suffix.FILTER_SIZE, dtype=bool), np.random.default_rng(3)
    text = RecentOutputs(0, has_pair)
    chunks = [rng.integers(0, 50_000, rng.integers(2, 99), dtype=np.int32) for _ in range(2000)]
    for chunk in chunks:
        text.add(chunk)
        assert len(text.tokens) <= MAX_TEXT
    kept = np.concatenate([np.append(chunk, np.int32(GAP)) for chunk in chunks])[-len(text.tokens) :]
    assert (text.tokens == kept).all()
    assert len(kept) >= MAX_TEXT // 2 - 100
    is_pair = (kept[:-1] != GAP) & (kept[1:] != GAP)
    assert has_pair[pair_hash(kept[:-1][is_pair], kept[1:][is_pair], suffix.FILTER_SIZE)].all()
    assert has_pair.mean() < 0.3


def test_texts_are_bounded_and_the_scope_used_last_stays() -> None:
    rows = Rows(num_rows=1)
    for number in range(MAX_SCOPES + 9):
        rows.begin(0, [1], scope=Scope(str(number)))
        rows.draft([1, *PHRASE])
    assert list(rows.drafter._texts) == [Scope(str(number)) for number in range(9, MAX_SCOPES + 9)]
    for number, is_kept in ((8, False), (9, True), (MAX_SCOPES + 8, True)):
        rows.begin(0, [1], scope=Scope(str(number)))
        assert rows.draft([2, *PHRASE[:5]]) == [PHRASE[5:10] if is_kept else []]


def test_draft_is_never_longer_than_its_limit_and_never_has_a_gap() -> None:
    rows, rng = Rows(num_rows=3, length=2000), np.random.default_rng(7)
    tokens = [rng.integers(0, 4, 2000).tolist() for _ in range(3)]
    for row in range(3):
        rows.begin(row, tokens[row][:1])
    num_drafted = 0
    for length in range(1, 2000, 3):
        for draft in rows.draft(*(each[:length] for each in tokens), limit=5):
            assert len(draft) <= 5
            assert GAP not in draft
            num_drafted += len(draft)
    assert num_drafted > 2000
