"""The KV cache block by block, as plain data: state and holders of each block. For display, not for the step.

One description serves the wire between our processes and the JSON that people read. A holder of another kind is one
more word in `HolderKind`.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.core.outputs import KVStats

Tier = Literal["kv", "swap"]  # the cache itself, and the swap space
BlockState = Literal["free", "cached", "used"]
HolderKind = Literal["sequence", "pin", "lease"]

MAX_BLOCKS_SHOWN = 4096   # blocks of one map
MAX_SPANS = 1024          # an overview has at most so many
MAX_OWNERS_SHOWN = 16     # owners of one block; ref_count counts them all


class BlockOwner(msgspec.Struct, frozen=True, gc=False):
    """One holder's share of a block: column `index` of its table, with the first `filled` slots filled."""

    holder: int
    index: int
    filled: int


class BlockEntry(msgspec.Struct, gc=False):
    """One block. A cached one has no owner, but its content can be found."""

    block: int
    state: BlockState
    tier: Tier
    ref_count: int
    owners: list[BlockOwner]            # tables that refer to it, the first MAX_OWNERS_SHOWN


class BlockHolder(msgspec.Struct, frozen=True):
    """A holder of blocks. A sequence is branch `branch` of a request, a pin is what a request has left.

    A lease is what is loaded from a disk for a waiting request.

    `owner`: the owner's label, "": none.
    """

    holder: int
    kind: HolderKind
    num_tokens: int                     # tokens with slots
    request_id: int | None = None
    branch: int | None = None
    owner: str = ""


class BlockOverview(msgspec.Struct, frozen=True):
    """All blocks of a tier in spans of `blocks_per_span`, of which the last may have fewer."""

    blocks_per_span: int
    used: list[int]                     # blocks of each span
    cached: list[int]
    holders: list[int | None]           # the holder of the most blocks of each span; None: none are held


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Blocks [first, first + len(blocks)) of a tier, all holders of one of them, and an overview of the whole tier."""

    first: int
    stats: KVStats                      # both tiers, whole
    blocks: list[BlockEntry]
    holders: list[BlockHolder]
    overview: BlockOverview
