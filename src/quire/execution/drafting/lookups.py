"""Lookups of drafts among known tokens, in plain form; `quire.kernels.cpp.lookup` has the same drafts from indexes.

N-grams: the tokens that followed the row's last n-gram before (prompt lookup decoding, Saxena 2023). The longest n-gram
that ends the row, from `min_size` to `max_size` tokens, is looked up among the row's own tokens. Of several matches the
last one counts: its continuation is the likeliest to be repeated.

Suffixes: the most frequent continuation of a row's last tokens (SuffixDecoding, Oliaro et al. 2024). The longest run of
tokens that ends the row is looked up among the row's own tokens and among recent outputs of its scope. Only requests
that may share keys and values share drafts. The matches vote token by token, and the draft ends where few of them
agree, or when it is as long as the run. Recent outputs are stored as one text of bounded size for each of a bounded
number of scopes.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import NewRow
from quire.core.pooling import Scope
from quire.execution.batch import IntArray

Tokens = NDArray[np.int32]

GAP = -1                 # between two chunks of a text
NO_TEXT = -1             # marks rows in scopes that have no text any more


class SuffixRules(NamedTuple):
    """Constants of suffix lookups, in the order of csrc/lookup.hpp."""

    min_run: int = 2            # tokens of the shortest run that is looked up
    max_run: int = 24           # length of the longest
    max_places: int = 32        # the latest matches, which vote
    min_share: float = 0.1      # share of matches that must continue as the draft does
    num_texts: int = 64         # most scopes with a text: 32 MiB in all, indexes included
    max_text: int = 1 << 15     # tokens of recent outputs of a scope
    chunk: int = 16             # tokens of an output that are added to a text at once
    overlap: int = 8            # tokens before a chunk that are added with it: runs across chunks are found
    gap: int = GAP


RULES = SuffixRules()


class Texts(Protocol):
    """Lookups in rows and in numbered texts of recent outputs."""

    def reset(self, row: int, num_tokens: int, text: int) -> None:
        """Begin a row with `num_tokens` known tokens, which are not added to its text.

        The last tokens of the row's previous owner, fewer than a chunk, are added to that one's text first.
        """

    def clear(self, text: int) -> None:
        """Empty a text. Rows that had it have none from now on."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the most frequent continuation of each row's last tokens; then add their new tokens to the texts."""


class ScopedLookup:
    """A `Lookup` with a text for each scope. A scope without one replaces the one that began a row longest ago."""

    def __init__(self, texts: Texts, num_texts: int = RULES.num_texts) -> None:
        self._texts, self._num_texts = texts, num_texts
        self._numbers = OrderedDict[Scope, int]()   # texts by scope, the latest to begin a row last
        self.draft = texts.draft

    def reset(self, new: NewRow) -> None:
        """Begin a row. An output from before a preemption is in the text already."""
        self._texts.reset(new.row, len(new.token_ids), self._number(new.scope))

    def _number(self, scope: Scope) -> int:
        number = self._numbers.pop(scope, None)
        if number is None:
            number = len(self._numbers)
            if number == self._num_texts:
                number = self._numbers.popitem(last=False)[1]
                self._texts.clear(number)
        self._numbers[scope] = number
        return number


class RecentOutputs:
    """Recent outputs of one scope, at most `max_tokens`, as chunks with gaps between them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.tokens: Tokens = np.empty(0, dtype=np.int32)   # with GAP behind each chunk

    def add(self, chunk: Tokens) -> None:
        """Append a chunk, int32 [at most max_tokens / 4]; drop the older half of a full text."""
        if len(self.tokens) + len(chunk) + 1 > self._max_tokens:
            self.tokens = self.tokens[self._max_tokens // 2 :]
        self.tokens = np.concatenate([self.tokens, chunk, np.array([GAP], dtype=np.int32)])


@dataclass(slots=True)
class RowOutput:
    """Tokens that a row adds to a text. `pending`: tokens that the text lacks, and some before them."""

    text: int = NO_TEXT
    num_added: int = 0     # known tokens that are in the text, or are not to be added
    pending: Tokens | None = None


class SuffixTexts:
    """`Texts` in plain form; token_ids int32 [max_rows, max_len], of all rows."""

    def __init__(self, token_ids: Tokens, max_drafts: int, rules: SuffixRules = RULES) -> None:
        self._token_ids, self._max_drafts, self._rules = token_ids, max_drafts, rules
        self._outputs = [RowOutput() for _ in token_ids]
        self._texts = [RecentOutputs(rules.max_text) for _ in range(rules.num_texts)]

    def reset(self, row: int, num_tokens: int, text: int) -> None:
        """Begin a row; first complete the text of its previous owner."""
        old = self._outputs[row]
        if old.text != NO_TEXT and old.pending is not None:
            self._texts[old.text].add(old.pending)
        self._outputs[row] = RowOutput(text, num_tokens)

    def clear(self, text: int) -> None:
        self._texts[text] = RecentOutputs(self._rules.max_text)
        for each in self._outputs:
            if each.text == text:
                each.text = NO_TEXT

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the most frequent continuation of each row's last tokens, where they occurred before."""
        drafts, max_len = dict[int, list[int]](), self._token_ids.shape[1]
        for row, place in zip(rows.tolist(), last.tolist(), strict=True):
            tokens, text = self._token_ids[row, : place + 1], self._outputs[row].text
            texts = [tokens] if text == NO_TEXT else [self._texts[text].tokens, tokens]
            draft = continuation(tokens, texts, min(self._max_drafts, max_len - 1 - place), self._rules)
            if draft:
                drafts[row] = draft
        for row, place in zip(rows.tolist(), last.tolist(), strict=True):
            self._add_output(self._outputs[row], self._token_ids[row, : place + 1])
        return drafts

    def _add_output(self, output: RowOutput, tokens: Tokens) -> None:
        """Add the latest tokens of a row to its text, a chunk at a time."""
        if output.text == NO_TEXT:
            return
        rules, num_new = self._rules, len(tokens) - output.num_added
        chunk = tokens[max(output.num_added - rules.overlap, len(tokens) - rules.max_text // 4, 0) :]
        output.pending = chunk.copy() if 0 < num_new < rules.chunk else None
        if num_new >= rules.chunk:
            self._texts[output.text].add(chunk)
            output.num_added = len(tokens)


def continuation(tokens: Tokens, texts: Sequence[Tokens], limit: int, rules: SuffixRules = RULES) -> list[int]:
    """Return the most frequent continuation, at most `limit` tokens, of the longest suffix that occurs in texts.

    tokens int32 [num], those before the continuation; texts int32 [num_tokens] each, the latest and likeliest last.
    """
    found = [longest_places(text, tokens[-rules.max_run :]) for text in texts]
    size = max(size for size, _ in found)
    if size < rules.min_run:
        return []
    limit = min(limit, size)
    places = [(text, end) for text, (own, ends) in zip(texts, found, strict=True) if own == size for end in ends]
    following = [text[end + 1 : end + 1 + limit].tolist() for text, end in places[-rules.max_places :]]
    return vote(following, limit, rules.min_share)


def longest_places(text: Tokens, run: Tokens) -> tuple[int, list[int]]:
    """Return the number of tokens of the longest suffix of `run` that occurs in a text, and its ends there, ascending.

    An occurrence at the text's end does not count: nothing follows it.
    """
    ends = np.flatnonzero(text[:-1] == run[-1])
    size = 1 if len(ends) else 0
    while size and size < len(run):
        longer = ends[ends >= size]
        longer = longer[text[longer - size] == run[-size - 1]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return size, ends.tolist()


def vote(following: Sequence[Sequence[int]], limit: int, min_share: float) -> list[int]:
    """Return the most frequent next token of some token lists, one by one; of equal counts the later list's.

    Lists with another token are dropped, and the draft ends when fewer than `min_share` of them are left.
    """
    draft, voters = list[int](), [each for each in following if each and each[0] != GAP]
    num_all = len(voters)
    for index in range(limit):
        counts = Counter(each[index] for each in reversed(voters) if len(each) > index and each[index] != GAP)
        if not counts:
            break
        (token, count), = counts.most_common(1)
        if count < min_share * num_all:
            break
        draft.append(token)
        voters = [each for each in voters if len(each) > index and each[index] == token]
    return draft


class NgramLookup:
    """A `Lookup` in a row's own tokens; token_ids int32 [max_rows, max_len], of all rows."""

    def __init__(self, token_ids: Tokens, max_drafts: int, min_size: int, max_size: int) -> None:
        self._token_ids, self._max_drafts = token_ids, max_drafts
        self._min_size, self._max_size = min_size, max_size

    def reset(self, new: NewRow) -> None:
        """Do nothing: there is no state."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the tokens that followed the last tokens of each row where these occurred before."""
        drafts, max_len = dict[int, list[int]](), self._token_ids.shape[1]
        for row, place in zip(rows.tolist(), last.tolist(), strict=True):
            found = self._find(self._token_ids[row, : place + 1])
            draft = self._token_ids[row, found : min(found + self._max_drafts, found + max_len - 1 - place, place + 1)]
            if found and draft.size:
                drafts[row] = draft.tolist()
        return drafts

    def _find(self, tokens: Tokens) -> int:
        """Return the position behind the last earlier occurrence of the longest n-gram that ends `tokens`; 0: none."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # positions of an n-gram's last token
        found = 0
        for size in range(1, min(self._max_size, len(tokens) - 1) + 1):
            ends = ends[ends >= size - 1]
            ends = ends[tokens[ends - size + 1] == tokens[-size]]
            if not ends.size:
                break
            if size >= self._min_size:
                found = int(ends[-1]) + 1
        return found
