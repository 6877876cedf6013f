"""Identity of keys and values, all that decides the bytes of a KV block beside its tokens and its scope; stored blocks.

Two engines with equal identities write the same bytes for the same tokens, so that blocks of one may be read by the
other: from a disk after a restart, from a file of a session, or over a connection. Any field that differs means other
bytes, or the same ones in another place.
"""

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

KV_EPOCH = 1  # raised by changes of kernels that change bits of keys or values: tests/engine/test_kv_identity.py


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """The identity of one rank's keys and values. Texts, and numbers as they are."""

    model: str         # digest of the spec: sizes, windows, epsilons, activations
    weights: str       # digest of every byte of every tensor that was read
    dtype: str         # weights and activations
    quantization: str  # weights, and the arithmetic of their products; empty: none
    kv_dtype: str      # stored elements, and scales
    block_size: int    # tokens of a block
    layout: str        # a block's bytes: tensors and their shapes
    arithmetic: str    # back end, and the instruction set or the architecture of its kernels
    rotary: str        # digest of the tables of cosines and sines, which the longest sequence may change
    parallel: str      # tensor parallelism: mode, ranks and this rank
    draft: str         # digest of the draft model's identity, if a block has its keys and values; empty: none
    epoch: int = KV_EPOCH

    def digest(self) -> str:
        """Return the SHA-256 of all fields, 64 hexadecimal digits."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()

    def as_json(self) -> str:
        """Return the fields as JSON, in their order."""
        return json.dumps(asdict(self), indent=1)

    def first_difference(self, other: "KVIdentity") -> str | None:
        """Return the first field that differs, with this identity's value and the other's; None: they are equal."""
        for field in fields(self):
            own, theirs = getattr(self, field.name), getattr(other, field.name)
            if own != theirs:
                return f"{field.name} {own!r}, not {theirs!r}"
        return None


# Why a fetch of blocks from another engine did not get all of them.
FETCH_FAILURES = ("unconnected", "disconnected", "refused", "gone", "not_kept", "other_tokens", "given_up")
NO_PARENT = -1


class StateParts(NamedTuple):
    """The parts in which a state is stored, each as large as a block: a path below the block that it is the end of.

    In the cache a part has a number as blocks have, behind those of the blocks.
    """

    num_blocks: int = 0   # the cache's
    num_parts: int = 0    # a state's; 0: the model keeps none

    def numbers(self, slot: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the numbers of parts [start, stop) of the state in a slot."""
        first = self.num_blocks + slot * self.num_parts
        return list(range(first + start, first + (self.num_parts if stop is None else stop)))

    def tokens(self, block_size: int) -> bytes:
        """Return what stands for the tokens of all parts, block_size numbers of 4 bytes each: negative, as no id is."""
        return b"".join(array("i", [-1 - part] * block_size).tobytes() for part in range(self.num_parts))


NO_STATES = StateParts()


class StoredBlock(NamedTuple):
    """A full block in a slot of a store: the tokens behind those of the block in slot `parent`, in a scope.

    Or a part of the state behind that block, or behind another part: `StateParts`.
    """

    slot: int
    parent: int    # NO_PARENT: the first block of its scope
    tokens: bytes  # block_size ids of 4 bytes each, as in keys of the prefix tree
    scope: bytes   # 32 bytes, of a salt and an adapter: see `KVStore.scope_key`
