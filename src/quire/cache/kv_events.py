"""KV events: which blocks can be found, told in the form of vLLM 0.33, under the names that vLLM gives its blocks.

Routers follow the events of many engines, and send a request where most of its prompt is cached. A block is named by a
hash of its tokens, of what else changes its keys and values, and of the name of the block before it. The tree itself
compares tokens, and has no use for names: they are computed when events are asked for, once for each block that can be
found by then, so that a block that came and went between two steps is never told.
"""

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

import msgspec

from quire.cache.prefix_tree import NONE, PrefixTree
from quire.core.config import CacheConfig
from quire.core.kv_events import HashAlgorithm
from quire.core.lora import MAX_ADAPTERS
from quire.core.pooling import NO_SCOPE, Scope

MEDIUM = "GPU"              # the pool that is computed on; vLLM calls it so on a CPU, too
DEFAULT_SEED = "vllm-none-hash"
BlockName = int | bytes
ExtraKeys = tuple[tuple[str, ...], ...]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks of one path that can be found from now on. The fields are vLLM's, in its order.

    `extra_keys`: for each block, what is in its name beside tokens: the adapter's name, and in a first block the salt.
    """

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None]
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: None = None               # this and the next are never set; with them the bytes are vLLM's
    ownership: None = None
    session_id: None = None
    lookahead_token_ids: None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that can no longer be found."""

    block_hashes: list[BlockName]
    medium: str | None
    group_idx: int | None = None
    locality: None = None
    ownership: None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No block can be found."""


# --- names of blocks: what vLLM hashes, as it encodes it -------------------------------------------------------------


def cbor(parent: bytes, token_ids: list[int], extra: ExtraKeys | None) -> bytes:
    """Return (parent, tokens, extra) in canonical CBOR (RFC 8949)."""
    keys = b"\xf6" if extra is None else _head(4, len(extra)) + b"".join(
        _head(4, len(key)) + b"".join(map(cbor_text, key)) for key in extra
    )
    tokens = b"".join([_head(0, token) for token in token_ids])
    return b"\x83" + _head(2, len(parent)) + parent + _head(4, len(token_ids)) + tokens + keys


def cbor_text(text: str) -> bytes:
    """Return a text as CBOR (RFC 8949): major type 3, UTF-8."""
    encoded = text.encode()
    return _head(3, len(encoded)) + encoded


def _head(kind: int, number: int) -> bytes:
    """Return the head of a CBOR item: its major type, and a number below 2^32 in as few bytes as hold it."""
    first = kind << 5
    if number < 24:
        return bytes((first | number,))
    num_bytes = 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4
    return bytes((first | 23 + num_bytes.bit_length(),)) + number.to_bytes(num_bytes, "big")


def pickled(parent: bytes, token_ids: list[int], extra: ExtraKeys | None) -> bytes:
    """Return (parent, tokens, extra) as Python's pickle writes it in protocol 5, the highest of Python 3.8 to 3.14.

    Written by hand: the format is fixed, and no module that runs what it reads is imported.
    """
    keys = b"N" if extra is None else _pickled_tuple([_pickled_tuple([*map(_pickled_text, key)]) for key in extra])
    tokens = b"(" + b"".join([_pickled_int(token) for token in token_ids]) + b"t\x94"
    parent_bytes = b"C" + bytes((len(parent),)) + parent + b"\x94"
    return _framed(parent_bytes + tokens + keys + b"\x87\x94")


def pickled_seed(text: str) -> bytes:
    """Return a text as Python's pickle writes it."""
    return _framed(_pickled_text(text))


def _framed(content: bytes) -> bytes:
    """Return a pickle of up to 64 KiB: protocol 5, one frame, stop."""
    return b"\x80\x05\x95" + (len(content) + 1).to_bytes(8, "little") + content + b"."


def _pickled_int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes((number,))
    return b"M" + number.to_bytes(2, "little") if number < 1 << 16 else b"J" + number.to_bytes(4, "little")


def _pickled_text(text: str) -> bytes:
    encoded = text.encode()
    size = b"\x8c" + bytes((len(encoded),)) if len(encoded) < 1 << 8 else b"X" + len(encoded).to_bytes(4, "little")
    return size + encoded + b"\x94"


def _pickled_tuple(items: list[bytes]) -> bytes:
    """Return a tuple of 1 to 3 items."""
    return b"".join(items) + bytes((0x84 + len(items), 0x94))


class BlockHash(NamedTuple):
    """One of vLLM's names of blocks: SHA-256 of what `encode` makes of a block; `seed` stands before first blocks."""

    encode: Callable[[bytes, list[int], ExtraKeys | None], bytes]
    seed: bytes

    def __call__(self, parent: bytes | None, token_ids: list[int], extra: ExtraKeys | None) -> bytes:
        """Return the hash of a block; `parent`: that of the block before it."""
        return sha256(self.encode(parent or self.seed, token_ids, extra)).digest()


def block_hash(algorithm: HashAlgorithm, seed: str | None = None) -> BlockHash:
    """Return the hash of this name; `seed`: vLLM takes it from PYTHONHASHSEED, or else has a fixed one."""
    encode, encode_text = (cbor, cbor_text) if algorithm == "sha256_cbor" else (pickled, pickled_seed)
    return BlockHash(encode, sha256(encode_text(DEFAULT_SEED if seed is None else seed)).digest())


# --- the tree ---------------------------------------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode


class TreeWithEvents(PrefixTree):
    """A tree that tells which of its nodes can be found. Its names of blocks take 65 bytes for each node."""

    __slots__ = (
        "_adapters", "_hash", "_hashes", "_is_first", "_keys_of", "_kind", "_new", "_removed", "_uses_int", "_window",
    )  # fmt: skip

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config.num_blocks, config.block_size)
        settings = config.kv_events
        assert settings is not None, "a tree with events, which are off"
        self._hash = block_hash(settings.hash_algorithm, os.environ.get("PYTHONHASHSEED"))
        self._uses_int = settings.use_int_block_hashes
        self._window = config.sliding_window
        self._kind = "full_attention" if config.sliding_window is None else "sliding_window"
        self._is_first = True                        # nothing was told yet
        self._new: dict[int, None] = {}              # nodes that have not been told, parents before children
        self._removed: list[BlockName] = []          # told, and gone since
        self._hashes: list[bytes | None] = [None] * config.num_blocks  # nodes that have been told
        self._keys_of: dict[int, ExtraKeys] = {}     # an adapter's nodes that have been told
        self._adapters = OrderedDict[str, tuple[str, str]]()  # digest: name and folder, the latest last

    def know_adapter(self, digest: str, name: str, folder: str) -> None:
        """Note an adapter's name and folder, which are in the names of its blocks; the first of a digest stay."""
        self._adapters.setdefault(digest, (name, folder))
        self._adapters.move_to_end(digest)
        if len(self._adapters) > MAX_ADAPTERS:
            self._adapters.popitem(last=False)

    def insert(self, parent: int, key: bytes, block: int) -> None:
        super().insert(parent, key, block)
        self._new[block] = None

    def remove(self, block: int) -> None:
        super().remove(block)
        hashed = self._hashes[block]
        if hashed is None:
            del self._new[block]
        else:
            self._removed.append(self._name(hashed))
            self._hashes[block] = None
            self._keys_of.pop(block, None)

    def take_events(self) -> bytes:
        """Return what has changed since the last call, as a msgpack array of events; nothing if nothing has.

        The first events of a tree begin with AllBlocksCleared: what an earlier one had is gone. A reader of all events
        knows exactly the nodes that can be found now.
        """
        if self._is_first:                           # the engine was restarted, or has slept
            self._is_first = False
            events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        elif self._new or self._removed:
            events = []
        else:
            return b""
        if self._removed:
            events.append(BlockRemoved(self._removed, MEDIUM, 0))
            self._removed = []
        last, stored = NONE, None                    # the block before, and the event that ends with it
        for block in [each for each in self._new if each not in self.pending]:
            del self._new[block]
            parent = self.parent(block)
            above, adapter, salt = self._above(parent)
            if stored is None or parent != last:
                stored = self._begin(above, adapter)
                events.append(stored)
            if adapter is not None:
                self._keys_of[block] = adapter
            keys = adapter if salt is None else (*(adapter or ()), ("cache_salt", salt))
            token_ids = array("i", self._tokens(block)).tolist()
            hashed = self._hashes[block] = self._hash(above, token_ids, keys)
            stored.block_hashes.append(self._name(hashed))
            stored.token_ids += token_ids
            stored.extra_keys.append(None if keys is None else tuple([key[1] for key in keys]))
            last = block
        return _encode(events) if events else b""

    def _above(self, parent: int) -> tuple[bytes | None, ExtraKeys | None, str | None]:
        """Return the hash of a parent, what its adapter adds to the names of blocks, and a salt if it is a root."""
        if parent not in self._scopes:
            return self._hashes[parent], self._keys_of.get(parent), None
        scope = self._scopes[parent] or NO_SCOPE
        assert isinstance(scope, Scope), f"blocks of {scope!r} have no names"
        if scope.adapter is None:
            return None, None, scope.salt
        return None, (("lora", *self._adapters.get(scope.adapter, (scope.adapter, ""))),), scope.salt

    def _begin(self, above: bytes | None, adapter: ExtraKeys | None) -> BlockStored:
        """Return the event of a path behind a block, or behind a root, without a block yet."""
        parent, name = None if above is None else self._name(above), None if adapter is None else adapter[0][1]
        return BlockStored([], parent, [], self.block_size, None, MEDIUM, name, [], 0, self._kind, self._window)

    def _name(self, hashed: bytes) -> BlockName:
        return int.from_bytes(hashed[-8:], "big") if self._uses_int else hashed
