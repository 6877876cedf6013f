"""Pending pins: prefixes that are being computed count towards the bounds on pins like pinned ones.

A pin counts with all of its blocks, shared ones included: it may be their only owner later.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.owner_labels import OPERATOR
from quire.engine.requests.pinned_prefixes import PinnedPrefixes
from quire.server.errors import invalid
from quire.server.options import Limits


class PendingPins:
    """Number of pending pins, and the blocks that they will hold by the number of the key."""

    def __init__(self) -> None:
        self._num_pins = 0
        self._num_blocks: list[tuple[int, int]] = []    # (number of the key, blocks) of each tokenized prompt

    def __len__(self) -> int:
        """Count the pending pins."""
        return self._num_pins

    @contextmanager
    def reserve(self, pinned: PinnedPrefixes, limits: Limits) -> Iterator[None]:
        """Reserve one pin. ApiError 400 past max_pinned_prefixes."""
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
        """Reserve blocks of the share of the cache that may be pinned. ApiError 400 past that share, or the key's.

        The operator has no share of its own, nor have clients without keys, which cannot be distinguished.
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
        pending = sum(blocks for key, blocks in self._num_blocks if key_number in (None, key))
        held, most = pinned.num_blocks(key_number) + pending, int(share * total_blocks)
        if held + num_blocks > most:
            owner = "" if key_number is None else " of this key"
            message = (
                f"the prefix takes {num_blocks} KV blocks, and pins{owner} hold {held} already, but of all "
                f"{total_blocks} (num_kv_blocks) they may hold {most} ({name} {share:g})"
            )
            invalid(message, param="prompt")
