"""Suffix drafts: the most frequent continuation of a row's last tokens (SuffixDecoding, Oliaro et al. 2024).

The longest run of tokens that ends the row is looked up among the row's own tokens and among recent outputs of its
scope. Only requests that may share keys and values share drafts. The matches vote token by token, and the draft ends
where few of them agree, or when it is as long as the run.

Recent outputs are stored as one text of bounded size for each of a bounded number of scopes. They are searched without
a suffix tree: a search of a text of `MAX_TEXT` tokens takes 10 us, and happens only if the row's last pair of tokens is
probably in the text.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import StepPlan
from quire.core.task import NO_SCOPE, Scope
from quire.execution.drafter import DraftRows
from quire.execution.drafting.pairs import RowPairs, Tokens, pair_hash
from quire.model.batch import ForwardBatch

MIN_RUN = 2              # tokens of the shortest run that is looked up
MAX_RUN = 24             # of the longest
MAX_PLACES = 32          # the latest matches, which vote
MIN_SHARE = 0.1          # of the matches that must continue as the draft does
MAX_TEXT = 1 << 15       # tokens of recent outputs of a scope
MAX_SCOPES = 64          # that have a text: 16 MiB in all, filters of pairs included
NO_TEXT = MAX_SCOPES     # slot of rows in scopes without recent outputs
CHUNK = 16               # tokens of an output that are added to a text at once
OVERLAP = 8              # tokens before a chunk that are added with it: runs across chunks are found
GAP = -1                 # between two chunks
FILTER_SIZE = 1 << 17    # bits, kept as bytes, of pairs in a text: a fifth of them is set at most


class RecentOutputs:
    """Recent outputs of one scope, as chunks with gaps between them.

    `has_pair`: filter of the pairs of neighbouring tokens, bool [FILTER_SIZE], indexed by `pair_hash`. `slot`: the
    number of the text.
    """

    def __init__(self, slot: int, has_pair: NDArray[np.bool_]) -> None:
        self.slot = slot
        self._tokens = np.full(MAX_TEXT, GAP, dtype=np.int32)
        self._num_tokens = 0
        self._has_pair = has_pair
        has_pair[:] = False

    @property
    def tokens(self) -> Tokens:
        """The text, int32 [num_tokens], with GAP behind each chunk."""
        return self._tokens[: self._num_tokens]

    def add(self, chunk: Tokens) -> None:
        """Append a chunk, int32 [at most MAX_TEXT / 4]; drop the older half of a full text."""
        if self._num_tokens + len(chunk) + 1 > MAX_TEXT:
            kept = self._tokens[MAX_TEXT // 2 : self._num_tokens].copy()
            self._tokens[: len(kept)] = kept
            self._num_tokens = len(kept)
            self._has_pair[:] = False
            self._add_pairs(kept)
        end = self._num_tokens + len(chunk)
        self._tokens[self._num_tokens : end], self._tokens[end] = chunk, GAP
        self._num_tokens = end + 1
        self._add_pairs(chunk)

    def _add_pairs(self, tokens: Tokens) -> None:
        self._has_pair[pair_hash(tokens[:-1], tokens[1:], FILTER_SIZE)] = True


class SuffixDrafter:
    """Drafts from a row's own tokens and recent outputs of its scope; token_ids int32 [max_rows, max_len]."""

    def __init__(self, token_ids: Tokens) -> None:
        self._token_ids, self._pairs = token_ids, RowPairs(token_ids)
        self._scopes: list[Scope] = [NO_SCOPE] * len(token_ids)
        self._has_pair = np.zeros((MAX_SCOPES + 1, FILTER_SIZE), dtype=bool)  # filters by slot; the last one is empty
        self._slots = np.full(len(token_ids), NO_TEXT)              # of each row's scope
        self._num_added = np.zeros(len(token_ids), dtype=np.int64)  # known tokens that are of the prompt or in a text
        self._texts = OrderedDict[Scope, RecentOutputs]()           # least recently used first

    def apply(self, plan: StepPlan) -> None:
        """Store the scopes of new rows. Outputs from before a preemption are in a text already."""
        self._pairs.reset(new.row for new in plan.new_rows)
        for new in plan.new_rows:
            self._scopes[new.row] = new.scope
            self._num_added[new.row] = len(new.token_ids)
            text = self._texts.get(new.scope)
            self._slots[new.row] = NO_TEXT if text is None else text.slot

    def compute(self, batch: ForwardBatch) -> None:
        """Do nothing: there are no keys and values."""

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return the most frequent continuation of each row's last tokens, where they occurred before."""
        own = set(self._pairs.recurring(rows.rows, rows.num_tokens).tolist())
        last = rows.num_tokens - 1
        before = self._token_ids[rows.rows, np.maximum(last - 1, 0)]
        hashes = pair_hash(before, self._token_ids[rows.rows, last], FILTER_SIZE)
        drafts = dict[int, Sequence[int]]()
        for place in sorted(own.union(np.flatnonzero(self._has_pair[self._slots[rows.rows], hashes]).tolist())):
            row, num_tokens = int(rows.rows[place]), int(rows.num_tokens[place])
            recent = self._texts.get(self._scopes[row])
            tokens = self._token_ids[row, :num_tokens]
            texts = [*([] if recent is None else [recent.tokens]), *([tokens] if place in own else [])]
            if texts and (draft := continuation(tokens[-MAX_RUN:], texts, int(rows.limits[place]))):
                drafts[row] = draft
        self._add_outputs(rows)
        return drafts

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""

    def _add_outputs(self, rows: DraftRows) -> None:
        """Add the latest tokens of rows to the texts of their scopes, a chunk at a time."""
        for place in np.flatnonzero(rows.num_tokens - self._num_added[rows.rows] >= CHUNK).tolist():
            row, num_tokens = int(rows.rows[place]), int(rows.num_tokens[place])
            start = max(int(self._num_added[row]) - OVERLAP, num_tokens - MAX_TEXT // 4, 0)
            self._text(self._scopes[row]).add(self._token_ids[row, start:num_tokens])
            self._num_added[row] = num_tokens

    def _text(self, scope: Scope) -> RecentOutputs:
        """Return the text of a scope; a new one replaces the least recently used one if there are MAX_SCOPES."""
        text = self._texts.pop(scope, None)
        if text is None:
            slot = len(self._texts)
            if slot == MAX_SCOPES:
                slot = self._texts.popitem(last=False)[1].slot
                self._slots[self._slots == slot] = NO_TEXT
            text = RecentOutputs(slot, self._has_pair[slot])
            self._slots[[row for row, own in enumerate(self._scopes) if own == scope]] = slot
        self._texts[scope] = text
        return text


def continuation(run: Tokens, texts: Sequence[Tokens], limit: int) -> list[int]:
    """Return the most frequent continuation, at most `limit` tokens, of a run's longest suffix that occurs in texts.

    run int32 [num], the tokens before the continuation; texts int32 [num_tokens] each, the latest and likeliest last.
    """
    found = [longest_places(text, run) for text in texts]
    size = max(size for size, _ in found)
    if size < MIN_RUN:
        return []
    limit = min(limit, size)
    places = [(text, end) for text, (own, ends) in zip(texts, found, strict=True) if own == size for end in ends]
    following = [text[end + 1 : end + 1 + limit].tolist() for text, end in places[-MAX_PLACES:]]
    return vote(following, limit)


def longest_places(text: Tokens, run: Tokens) -> tuple[int, list[int]]:
    """Return the number of tokens of the longest suffix of `run` that occurs in a text, and its ends there, ascending.

    An occurrence at the text's end does not count: nothing follows it. At most the last MAX_PLACES ends.
    """
    ends = np.flatnonzero(text[:-1] == run[-1])
    size = 1 if len(ends) else 0
    while size and size < len(run):
        longer = ends[ends >= size]
        longer = longer[text[longer - size] == run[-size - 1]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return size, ends[-MAX_PLACES:].tolist()


def vote(following: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Return the most frequent next token of some token lists, one by one; of equal counts the later list's.

    Lists with another token are dropped, and the draft ends when fewer than MIN_SHARE of them are left.
    """
    draft, voters = list[int](), [each for each in following if each and each[0] != GAP]
    num_all = len(voters)
    for index in range(limit):
        counts = Counter(each[index] for each in reversed(voters) if len(each) > index and each[index] != GAP)
        if not counts:
            break
        (token, count), = counts.most_common(1)
        if count < MIN_SHARE * num_all:
            break
        draft.append(token)
        voters = [each for each in voters if len(each) > index and each[index] == token]
    return draft
