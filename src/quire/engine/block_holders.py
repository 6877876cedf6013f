"""Holders of KV blocks: the cache knows sequences by number, the scheduler knows their requests."""

from collections import defaultdict
from collections.abc import Iterable

from quire.core.block_map import BlockEntry, BlockHolder
from quire.core.owner_labels import UNLABELLED
from quire.core.sequence import NO_ROW
from quire.scheduling.scheduler import Scheduler


def count_blocks_by_owner(scheduler: Scheduler) -> dict[str, int]:
    """Return how many blocks the requests of each label hold. Linear in their tables; nothing without labels."""
    seq_ids = defaultdict[str, list[int]](list)
    for request in scheduler.running:
        if request.owner != UNLABELLED:
            seq_ids[request.owner] += [sequence.seq_id for sequence in request.live if sequence.row != NO_ROW]
    return {owner: scheduler.cache.count_blocks(ids) for owner, ids in seq_ids.items()}


def list_holders(scheduler: Scheduler, blocks: Iterable[BlockEntry]) -> list[BlockHolder]:
    """Return the sequences and pins that hold any of these blocks, in order of arrival."""
    seen = {owner.holder for entry in blocks for owner in entry.owners}
    known = {
        sequence.seq_id: BlockHolder(
            sequence.seq_id, "sequence", sequence.num_computed_tokens, request.request_id, sequence.index, request.owner
        )
        for request in (*scheduler.running, *scheduler.swapped)
        for sequence in request.live
        if sequence.seq_id in seen
    }
    pins = [-1 - holder for holder in sorted(seen - known.keys(), reverse=True)]
    pinned = (BlockHolder(-1 - pin, "pin", scheduler.cache.num_pinned_tokens(pin), pin) for pin in pins)
    return [*known.values(), *pinned]
