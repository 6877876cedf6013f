"""A subscriber's view of an engine's cache, from its KV events alone, and what the events of a tree must amount to."""

from typing import Any

import msgspec

from quire.cache.kv_events import TreeWithEvents


class EventReader:
    """Blocks that can be found, by name: the name of the block before, and the tokens. Asserts that events agree."""

    def __init__(self) -> None:
        self.blocks: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}

    def apply(self, events: bytes) -> list[dict[str, Any]]:
        """Read a msgpack array of events; return them."""
        decoded = msgspec.msgpack.decode(events) if events else []
        for event in decoded:
            self._apply(event)
        return list(decoded)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.blocks[name]
        else:
            assert event["type"] == "BlockStored"
            size, names, parent = event["block_size"], event["block_hashes"], event["parent_block_hash"]
            assert len(event["token_ids"]) == size * len(names)
            assert len(event["extra_keys"]) == len(names)
            assert parent is None or parent in self.blocks, "blocks behind one that cannot be found"
            for index, name in enumerate(names):
                assert name not in self.blocks, "told twice"
                self.blocks[name] = parent, tuple(event["token_ids"][index * size : (index + 1) * size])
                parent = name

    def num_cached(self, token_ids: list[int], block_size: int) -> int:
        """Return how many first tokens are in whole blocks that can be found, without a salt: what a router asks."""
        names = {where: name for name, where in self.blocks.items()}
        parent, num_cached = None, 0
        while (where := (parent, tuple(token_ids[num_cached : num_cached + block_size]))) in names:
            parent, num_cached = names[where], num_cached + block_size
        return num_cached


def findable(tree: TreeWithEvents) -> dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]]:
    """Return the nodes of a tree that can be found, as a reader knows them, from the tree itself."""
    found: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}
    below: list[tuple[int, bytes | None, str | None]] = [
        (root, None, scope and scope[0]) for root, scope in tree._scopes.items()  # type: ignore[index]
    ]
    while below:
        parent, above, salt = below.pop()
        for block in tree.children(parent):
            if block in tree.pending:
                continue
            token_ids = memoryview(tree._tokens(block)).cast("i").tolist()
            hashed = tree._hash(above, token_ids, (("cache_salt", salt),) if salt and above is None else None)
            found[tree._name(hashed)] = None if above is None else tree._name(above), tuple(token_ids)
            below.append((block, hashed, None))
    return found
