"""Bound on the work of admission in one step, so that a burst does not hold up the sequences that run.

Looking up and sharing the 8,000 blocks of a prompt of 128,000 tokens takes half a millisecond or more, beginning a
sequence 70 microseconds, and hundreds of requests may be admissible at once. When a step has done so much, the next
ones admit the rest, in the same order. The first admission of a step is never held up.
"""

from quire.cache.prefix_cache import PrefixMatch

MAX_WORK = 16_384   # units of half a microsecond (AMD EPYC, 2024): 8 ms
_LOOKUP_WORK = 16   # besides a unit for each node of the prefix tree
_ROW_WORK = 128     # to begin a sequence
_BLOCKS_PER_UNIT = 8  # to compare, share and copy those that are found in a table


class AdmissionWork:
    """Counts the work of the step that is being planned."""

    def __init__(self) -> None:
        self._done = 0

    def start_step(self) -> None:
        """Begin a step."""
        self._done = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the step has done its share, and admits no more."""
        return self._done >= MAX_WORK

    def count_lookup(self, match: PrefixMatch) -> None:
        """Count a lookup: the nodes that it visited, and the blocks that it found in a table."""
        self._done += _LOOKUP_WORK + len(match.blocks) - match.num_known + match.num_known // _BLOCKS_PER_UNIT

    def count_refreshed(self) -> None:
        """Count a pending match that was followed from the last step."""
        self._done += _LOOKUP_WORK

    def count_row(self, num_blocks: int) -> None:
        """Count a sequence that begins in a row, with so many blocks."""
        self._done += _ROW_WORK + num_blocks // _BLOCKS_PER_UNIT
