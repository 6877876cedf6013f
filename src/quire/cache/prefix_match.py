"""Records of cached prefixes: what a sequence that begins finds, and the path of one whose blocks can be found."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Scope = Hashable

NONE = -1   # no block


@dataclass(slots=True)
class Path:
    """One sequence's way through the tree."""

    token_ids: Sequence[int]    # all known ones; grows in the hands of the sequence's owner
    scope: Scope
    num_blocks: int = 0         # leading columns of its table that are in the tree
    keeps_all: bool = False     # no block is given up when it leaves the sliding window: it will be pinned
    swap_in_pending: bool = False   # the step under way swaps its blocks in: they can be found when that is over
    pending: tuple[int, int] | None = None  # column and block of the first node that the step computes for it


class Awaited(NamedTuple):
    """The sequence, by its path, that computes what a pending match waits for.

    Both have the same first `num_tokens` tokens; the match was asked for up to `stop` of them.
    """

    path: Path
    num_tokens: int
    stop: int


class PrefixMatch(NamedTuple):
    """The cached tokens of a sequence that has not started. Valid until blocks are next allocated or freed.

    `num_tokens` need not be computed: those of `blocks`, all full, then the first `num_inside` of `source`, a block
    that is copied. The last token that was asked for is never among them, even if its block is. `num_in_use`: how
    many of `blocks` have an owner, so that one more costs nothing. `awaited`: the sequence that computes the block
    after these in this step, if there is one. `num_known`: how many of `blocks` were found in a table.
    """

    blocks: Sequence[int] = ()
    num_tokens: int = 0
    source: int = NONE
    num_inside: int = 0
    num_in_use: int = 0
    awaited: Awaited | None = None
    num_known: int = 0

    @property
    def is_pending(self) -> bool:
        """The block after these is being computed in this step."""
        return self.awaited is not None

    def of_whole_blocks(self) -> "PrefixMatch":
        """Return the match without what would have to be copied."""
        if self.source == NONE:
            return self
        return self._replace(num_tokens=self.num_tokens - self.num_inside, source=NONE, num_inside=0)


NO_MATCH = PrefixMatch()
