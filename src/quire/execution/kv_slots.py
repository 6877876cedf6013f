"""Slots of a KV store: the record of each, in memory and in the file `index`.

A record names its block by everything that a match compares, and holds the digest of the block's bytes. `check` is a
keyed digest of the other fields: a record that was changed, half written, or copied from another folder does not fit
and is not there. `stamp` is drawn for each write: a block is below a parent only while that slot has what it had when
the block was written.
"""

import hashlib
import os
import secrets
import struct

import numpy as np

from quire.core.kv_identity import NO_PARENT, StoredBlock
from quire.core.token_ids import TOKEN_BYTES

SCOPE_BYTES = 32
_SEAL = struct.Struct("<QQ")           # check, digest of the block's bytes
_FIELDS = struct.Struct("<QQQqq32s")   # order of writes, stamp, the parent's stamp, slot, parent, scope; then tokens
EMPTY_SEAL = bytes(_SEAL.size)


class SlotTable:
    """Records of all slots; those that are empty, or being written, have no seal."""

    def __init__(self, num_slots: int, block_size: int, key: bytes) -> None:
        self.num_slots, self.record_bytes = num_slots, record_bytes(block_size)
        self._token_bytes, self._key = block_size * TOKEN_BYTES, key
        self._records = np.zeros((num_slots, self.record_bytes), np.uint8)
        self._stamps = np.zeros(num_slots, np.uint64)  # 0: an empty slot
        self._order = 0

    def read(self, file: int) -> list[StoredBlock]:
        """Take the records of a file that fit, and return their blocks in the order of their writes: parents first."""
        num_bytes, found = self.num_slots * self.record_bytes, list[tuple[int, int, int, StoredBlock, bytes]]()
        whole = _read(file, num_bytes)
        records = np.frombuffer(whole, np.uint8, len(whole) // self.record_bytes * self.record_bytes)
        records = records.reshape(-1, self.record_bytes)
        for slot in np.flatnonzero(records.any(axis=1)).tolist():
            record = records[slot].tobytes()
            order, stamp, parent_stamp, own_slot, parent, scope = _FIELDS.unpack_from(record, _SEAL.size)
            is_sealed = record[: _SEAL.size] == self.seal(record[_SEAL.size :], _digest_of(record))
            if is_sealed and own_slot == slot:
                tokens = record[_SEAL.size + _FIELDS.size :][: self._token_bytes]
                found.append((order, stamp, parent_stamp, StoredBlock(slot, parent, tokens, scope), record))
        blocks, scopes = list[StoredBlock](), dict[int, bytes]()  # keyed by slots
        for order, stamp, parent_stamp, block, record in sorted(found, key=lambda each: each[0]):
            self._order = max(self._order, order)
            if block.parent != NO_PARENT and (
                scopes.get(block.parent) != block.scope or self._stamps[block.parent] != parent_stamp
            ):
                continue
            self._records[block.slot], self._stamps[block.slot] = np.frombuffer(record, np.uint8), stamp
            scopes[block.slot] = block.scope
            blocks.append(block)
        return blocks

    def begin(self, block: StoredBlock) -> bytes:
        """Put a block into its slot, without a seal; return the fields that the seal covers."""
        slot, parent, tokens, scope = block
        assert len(tokens) == self._token_bytes, f"{len(tokens)} bytes of tokens"
        assert len(scope) == SCOPE_BYTES, f"a scope of {len(scope)} bytes"
        assert parent == NO_PARENT or self._stamps[parent], f"slot {slot} below slot {parent}, which is empty"
        self._order += 1
        stamp = secrets.randbits(64) | 1
        parent_stamp = 0 if parent == NO_PARENT else int(self._stamps[parent])
        fields = _FIELDS.pack(self._order, stamp, parent_stamp, slot, parent, scope) + tokens
        fields += bytes(self.record_bytes - _SEAL.size - len(fields))
        self._records[slot] = np.frombuffer(EMPTY_SEAL + fields, np.uint8)
        self._stamps[slot] = stamp
        return fields

    def seal(self, fields: bytes, payload: int) -> bytes:
        """Return what a record begins with, for its fields and the digest of the block's bytes. Any thread may call."""
        covered = payload.to_bytes(8, "little") + fields
        return hashlib.blake2b(covered, digest_size=8, key=self._key).digest() + covered[:8]

    def finish(self, slot: int, fields: bytes, seal: bytes | None) -> bool:
        """Seal the record of a block that was written, or empty its slot; False if it is not there.

        `fields`: what `begin` returned. A slot that has been begun or emptied since then is left as it is.
        """
        if self._records[slot, _SEAL.size :].tobytes() != fields:
            return False
        if seal is None:
            self.clear(slot)
            return False
        self._records[slot, : _SEAL.size] = np.frombuffer(seal, np.uint8)
        return True

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._stamps[slot], self._records[slot] = 0, 0

    def payload(self, block: StoredBlock) -> int | None:
        """Return the digest of a block's bytes; None if its slot does not hold it, whole and below the same parent."""
        record = self._records[block.slot].tobytes()
        _, _, parent_stamp, slot, parent, scope = _FIELDS.unpack_from(record, _SEAL.size)
        tokens = record[_SEAL.size + _FIELDS.size :][: self._token_bytes]
        is_below = parent_stamp == (0 if parent == NO_PARENT else self._stamps[parent])
        if record[: _SEAL.size] == EMPTY_SEAL or not is_below or (slot, parent, tokens, scope) != block:
            return None
        return _digest_of(record)

    def digest(self, slot: int) -> int:
        """Return the digest of the bytes of the block in a slot; 0 if there is none."""
        return _digest_of(self._records[slot].tobytes())


def record_bytes(block_size: int) -> int:
    """Return the bytes of a block's record: seal, fields and tokens, a multiple of 8."""
    num_bytes = _SEAL.size + _FIELDS.size + block_size * TOKEN_BYTES
    return num_bytes + -num_bytes % 8


def _digest_of(record: bytes) -> int:
    digest: int = _SEAL.unpack_from(record)[1]
    return digest


def _read(file: int, num_bytes: int) -> bytes:
    """Return the first bytes of a file, as many as there are."""
    parts, offset = list[bytes](), 0
    while part := os.pread(file, num_bytes - offset, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
