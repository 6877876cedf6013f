"""Prefixes that are being computed, to be pinned: they count towards the bounds on pins like those that are pinned.

A pin counts with all of its blocks, also those that it shares with other pins: what is shared now may be the only one
later.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.owner_labels import OPERATOR
from quire.engine.pinned_prefixes import PinnedPrefixes
from quire.server.errors import invalid
from quire.server.options import Limits


class PendingPins:
    """Counts of requests that pin, and of the blocks that they will hold, by the number of the key."""

    def __init__(self) -> None:
        self._num_pins = 0
        self._num_blocks: list[tuple[int, int]] = []    # (number of the key, blocks) of each prompt that is tokenized

    def __len__(self) -> int:
        """Count the prefixes."""
        return self._num_pins

    @contextmanager
    def reserve(self, pinned: PinnedPrefixes, limits: Limits) -> Iterator[None]:
        """Hold one of the pins that there may be. ApiError 400 if there are too many."""
        num_pins, most = len(pinned) + self._num_pins, limits.max_pinned_prefixes
        if num_pins >= most:
            message = f"{num_pins} prefixes are pinned already, and at most {most} may be (max_pinned_prefixes)"
            invalid(message, param="prompt")
        self._num_pins += 1
        try:
            yield
        finally:
            self._num_pins -= 1

    @contextmanager
    def reserve_blocks(
        self, key_number: int, num_blocks: int, total_blocks: int, pinned: PinnedPrefixes, limits: Limits
    ) -> Iterator[None]:
        """Hold blocks of the share of the cache that may be pinned. ApiError 400 if it, or that of the key, is full.

        The operator has no share of its own, nor have clients without a key, who cannot be told apart.
        """
        self._check("max_pinned_share", None, num_blocks, total_blocks, pinned, limits)
        if key_number not in (0, OPERATOR):
            self._check("max_pinned_share_per_key", key_number, num_blocks, total_blocks, pinned, limits)
        held = key_number, num_blocks
        self._num_blocks.append(held)
        try:
            yield
        finally:
            self._num_blocks.remove(held)

    def _check(
        self, name: str, key_number: int | None, num_blocks: int, total_blocks: int, pinned: PinnedPrefixes,
        limits: Limits,
    ) -> None:  # fmt: skip
        share = getattr(limits, name)
        under_way = sum(blocks for key, blocks in self._num_blocks if key_number in (None, key))
        held, most = pinned.num_blocks(key_number) + under_way, int(share * total_blocks)
        if held + num_blocks > most:
            whose = "" if key_number is None else " of this key"
            message = (
                f"the prefix takes {num_blocks} KV blocks, and pins{whose} hold {held} already, but of all "
                f"{total_blocks} (num_kv_blocks) they may hold {most} ({name} {share:g})"
            )
            invalid(message, param="prompt")
