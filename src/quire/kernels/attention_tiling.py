"""Cut a step's queries and their contexts into tiles: index work that all layers of the step share.

A query tile is a few consecutive tokens of one sequence: those of one matrix product where a sequence advances by one
token, `TOKENS_PER_QUERY_TILE` otherwise. A key tile is `SLOTS_PER_KEY_TILE` consecutive positions;
`KEY_TILES_PER_ROUND` of them make a round, in which every score is known before the softmax weighs it. All borders
stand at fixed absolute positions: neither how a sequence is chunked nor what else runs moves one. A query tile never
crosses a border between key tiles, so that without a window only its last key tile needs a mask.

A token's query heads, padded to a power of two, stand in the same rows of a product of `ROWS_PER_PRODUCT` rows whatever
the height of the tile: every product of a layer has one shape, and a row one place in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLOTS_PER_KEY_TILE = 64
TOKENS_PER_QUERY_TILE = 32  # divides SLOTS_PER_KEY_TILE
KEY_TILES_PER_ROUND = 16
MAX_SCRATCH_BYTES = 8 << 20  # of one round of one group of query tiles; these and the next: docs/decisions/0002
ROWS_PER_PRODUCT = 16  # divides SLOTS_PER_KEY_TILE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class HeadShape(NamedTuple):
    """What the tiling needs to know of a layer. `window`: tokens that a token sees, itself included; None: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_per_token(self) -> int:
        """Rows that a token takes: the group, padded to a power of two so as never to straddle a product's border."""
        return 1 << (self.group - 1).bit_length()

    @property
    def tokens_per_product(self) -> int:
        """Tokens whose rows make a product; 1 where a token's rows make several."""
        return max(1, ROWS_PER_PRODUCT // self.rows_per_token)

    @property
    def products_per_token(self) -> int:
        """Products that a token's rows make; 1 where they make a part of one."""
        return max(1, self.rows_per_token // ROWS_PER_PRODUCT)

    def bytes_per_pair(self, height: int) -> int:
        """Scratch memory for one key tile under one query tile: float32 queries, scores, results, keys and values."""
        rows = height * self.rows_per_token
        floats = rows * (SLOTS_PER_KEY_TILE + 2 * self.head_dim) + 2 * SLOTS_PER_KEY_TILE * self.head_dim
        return 4 * self.num_kv_heads * floats


@dataclass(frozen=True, slots=True)
class StepShape:
    """The step as the worker describes it; shapes and meaning as in `paged_attention.reference`, on the CPU."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return int(self.query_starts[-1])


class Segment(NamedTuple):
    """Pairs of one key tile that stand together: query tiles [begin, end) of the group, from pair `pair` on."""

    begin: int
    end: int
    pair: int


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs of a query tile and a key tile, for one round of one group; a query tile's pairs in ascending order.

    `tiles` [num_pairs] int64: the query tile in its group. `units` [num_pairs * units per key tile] int64: rows of the
    cache cut into units. Pairs from `masked_from` on need a mask: `hidden` [num_masked, height, SLOTS_PER_KEY_TILE],
    true where a token does not see a slot, `dead` [num_masked, SLOTS_PER_KEY_TILE], true where no token does.
    """

    tiles: Tensor
    units: Tensor
    segments: list[Segment]
    masked_from: int
    hidden: Tensor
    dead: Tensor


@dataclass(frozen=True, slots=True)
class TileGroup:
    """As many query tiles of one height as the scratch memory allows, and their rounds.

    `sources` and `targets` [num_tiles * height] int64: rows of the flat batch, at absolute positions modulo `height`;
    where a tile has no token, the source is row 0 and the target one past the batch.
    """

    height: int
    sources: Tensor
    targets: Tensor
    rounds: list[Round]


def slots_per_unit(block_size: int) -> int:
    """Return how many slots are gathered as one run of bytes: a block, or a key tile's share of a larger block."""
    return min(block_size, SLOTS_PER_KEY_TILE)


def tile_step(step: StepShape, heads: HeadShape) -> list[TileGroup]:
    """Return groups of query tiles that together cover every token of the step."""
    counts = np.diff(step.query_starts.numpy())
    groups: list[TileGroup] = []
    for height, chosen in ((heads.tokens_per_product, counts == 1), (TOKENS_PER_QUERY_TILE, counts > 1)):
        sequences = chosen.nonzero()[0]
        if len(sequences):
            groups.extend(_groups(_cut_queries(step, sequences, height), step, heads, height))
    return groups


@dataclass(frozen=True, slots=True)
class _QueryTiles:
    """Per query tile: its sequence, the row and position of its first token, and its number of tokens; [num_tiles]."""

    sequences: Ints
    rows: Ints
    starts: Ints
    counts: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Ints | slice) -> "_QueryTiles":
        return _QueryTiles(self.sequences[which], self.rows[which], self.starts[which], self.counts[which])

    def last_keys(self) -> Ints:
        return self.starts // SLOTS_PER_KEY_TILE

    def first_keys(self, window: int | None) -> Ints:
        if window is None:
            return np.zeros_like(self.starts)
        return np.maximum(self.starts - window + 1, 0) // SLOTS_PER_KEY_TILE


def _cut_queries(step: StepShape, sequences: Ints, height: int) -> _QueryTiles:
    """Cut each sequence's queries at the multiples of `height`; latest position first, so that ranges stay ranges."""
    query_starts, context_lens = (x.numpy().astype(np.int64) for x in (step.query_starts, step.context_lens))
    rows, stops = query_starts[sequences], context_lens[sequences]
    starts = stops - (query_starts[sequences + 1] - rows)
    first_tiles = starts // height
    num_tiles = (stops - 1) // height - first_tiles + 1
    owner = np.repeat(np.arange(len(sequences)), num_tiles)
    tile = first_tiles[owner] + np.arange(len(owner)) - (num_tiles.cumsum() - num_tiles)[owner]
    begins = np.maximum(tile * height, starts[owner])
    ends = np.minimum((tile + 1) * height, stops[owner])
    tiles = _QueryTiles(sequences[owner], rows[owner] + begins - starts[owner], begins, ends - begins)
    return tiles.take(np.argsort(-begins, kind="stable"))


def _groups(queries: _QueryTiles, step: StepShape, heads: HeadShape, height: int) -> Iterator[TileGroup]:
    """Cut the query tiles into groups whose rounds fit into the scratch memory."""
    max_pairs = MAX_SCRATCH_BYTES // heads.bytes_per_pair(height)
    begin = 0
    while begin < len(queries):
        pairs_per_tile = min(KEY_TILES_PER_ROUND, int(queries.starts[begin]) // SLOTS_PER_KEY_TILE + 1)
        end = begin + max(1, max_pairs // pairs_per_tile)
        yield _group(queries.take(slice(begin, end)), step, heads.window, height)
        begin = end


def _group(queries: _QueryTiles, step: StepShape, window: int | None, height: int) -> TileGroup:
    ahead = np.arange(height) - (queries.starts % height)[:, None]  # of the tile's first token, [num_tiles, height]
    is_token = (ahead >= 0) & (ahead < queries.counts[:, None])
    rows = queries.rows[:, None] + ahead
    positions = np.where(is_token, queries.starts[:, None] + ahead, -1)
    stop = int(queries.last_keys()[0]) + 1
    begin = int(queries.first_keys(window)[-1]) // KEY_TILES_PER_ROUND * KEY_TILES_PER_ROUND
    rounds = [
        _round(queries, step, positions, np.arange(key, min(key + KEY_TILES_PER_ROUND, stop)), window)
        for key in range(begin, stop, KEY_TILES_PER_ROUND)
    ]
    return TileGroup(
        height,
        sources=torch.from_numpy(np.where(is_token, rows, 0).ravel()),
        targets=torch.from_numpy(np.where(is_token, rows, step.num_tokens).ravel()),
        rounds=[each for each in rounds if each.segments],  # windows far apart leave rounds at which nobody looks
    )


def _round(queries: _QueryTiles, step: StepShape, positions: Ints, keys: Ints, window: int | None) -> Round:
    """Lay out the pairs of the key tiles `keys`: those that need no mask first.

    Latest positions come first, so the query tiles that look at a key tile are a range, and so are those for which it
    is not the last.
    """
    looks = (queries.first_keys(window) <= keys[:, None]) & (keys[:, None] <= queries.last_keys())
    is_clear = looks & (keys[:, None] < queries.last_keys()) & (window is None)
    segments, clear_keys, clear_tiles = _pairs(is_clear, 0)
    masked_from = len(clear_keys)
    masked_segments, masked_keys, masked_tiles = _pairs(looks & ~is_clear, masked_from)
    tiles = np.concatenate([clear_tiles, masked_tiles])
    starts = keys[np.concatenate([clear_keys, masked_keys])] * SLOTS_PER_KEY_TILE  # of each pair's key tile
    slots = starts[masked_from:, None, None] + np.arange(SLOTS_PER_KEY_TILE)
    hidden = _hidden(slots, positions[masked_tiles][:, :, None], window)
    return Round(
        torch.from_numpy(tiles),
        torch.from_numpy(_units(queries.take(tiles), step, starts, window)),
        segments + masked_segments,
        masked_from,
        torch.from_numpy(hidden),
        torch.from_numpy(hidden.all(1)),
    )


def _pairs(chosen: Bools, first_pair: int) -> tuple[list[Segment], Ints, Ints]:
    """Return the segments, key tiles and query tiles of the pairs in `chosen` [num_keys, num_tiles], key by key."""
    counts, begins = chosen.sum(1).tolist(), chosen.argmax(1).tolist()
    segments = []
    for count, begin in zip(counts, begins, strict=True):
        if count:
            segments.append(Segment(begin, begin + count, first_pair))
            first_pair += count
    key_tiles, query_tiles = chosen.nonzero()
    return segments, key_tiles, query_tiles


def _hidden(slots: Ints, seeing: Ints, window: int | None) -> Bools:
    """Return where a token at position `seeing` does not see the slot at position `slots`."""
    hidden = slots > seeing
    return hidden if window is None else hidden | (slots <= seeing - window)


def _units(queries: _QueryTiles, step: StepShape, starts: Ints, window: int | None) -> Ints:
    """Return the cache units of key tiles that begin at positions `starts`, [num_pairs * units per key tile].

    Table entries of which the query tile sees no slot are never followed: unit 0 stands there.
    """
    unit = slots_per_unit(step.block_size)
    starts = starts[:, None] + np.arange(0, SLOTS_PER_KEY_TILE, unit)  # of each unit
    is_seen = starts < (queries.starts + queries.counts)[:, None]
    if window is not None:
        is_seen &= starts + unit > (queries.starts - window + 1)[:, None]
    columns = np.where(is_seen, starts // step.block_size, 0)
    blocks = step.block_tables.numpy()[queries.sequences[:, None], columns].astype(np.int64)
    units = blocks * (step.block_size // unit) + starts % step.block_size // unit
    return np.where(is_seen, units, 0).ravel()
