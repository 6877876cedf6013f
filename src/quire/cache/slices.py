"""Slices of long work: a check of a million blocks takes seconds, so it is a generator that yields every millisecond.

Its caller resumes it while the engine is idle, and drops it as soon as anything changes: what it has checked by then is
out of date.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

SLICE = 2048  # blocks that Python code looks at between two yields: about 1 ms

Item = TypeVar("Item")


def in_slices(items: Iterable[Item], num_items: int = SLICE) -> Iterator[list[Item]]:
    """Yield lists of the next `num_items` items."""
    iterator = iter(items)
    while chunk := list(islice(iterator, num_items)):
        yield chunk


def run_to_the_end(work: Iterable[None]) -> None:
    """Do all of a sliced work at once."""
    for _ in work:
        pass
