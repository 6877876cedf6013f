"""Groups of rows that share a weight, in tiles for grouped products, and sums of the products of a row.

The rows of a group are those of an expert, or of an adapter. They are listed in ascending order, the groups one after
the other, by counting: no sort, no atomic operation, nothing that the host has to know. A group's tiles have numbers of
their own: group g, with rows from place `start` of the list on, has tiles from start // height + g up to those of the
next one, at least as many as its rows need. So the number of tiles follows from that of rows and groups, and a graph
can be captured; tiles without a row end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # rows that a program looks at together, and columns that it adds up


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """Rows by group, cut into tiles of at most `tile_height` rows of one group."""

    order: Tensor         # int32 [num_rows]: the rows of group 0, those of group 1, ...; before them rows of none
    starts: Tensor        # int32 [num_groups + 1]: where each group begins in the order
    tile_groups: Tensor   # int32 [num_tiles]; -1: a tile without a row
    tile_rows: Tensor     # int32 [num_tiles]: where a tile begins in the order
    tile_height: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of a kernel's arguments."""
        return self.order, self.starts, self.tile_groups, self.tile_rows


def group_rows(group_of_row: Tensor, num_groups: int, tile_height: int) -> RowGroups:
    """Return the groups of rows. group_of_row: int32 [num_rows], contiguous; -1: a row of no group."""
    num_rows, device = len(group_of_row), group_of_row.device
    num_tiles = num_rows // tile_height + num_groups
    sizes = num_rows, num_groups + 1, num_tiles, num_tiles
    order, starts, groups, begins = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    _group_kernel[(num_groups,)](
        group_of_row, order, starts, groups, begins, num_rows, HEIGHT=tile_height, BLOCK=BLOCK
    )
    return RowGroups(order, starts, groups, begins, tile_height)


def add_in_order(
    results: Tensor, dtype: torch.dtype, weights: Tensor | None = None, last: Tensor | None = None
) -> Tensor:
    """Return the sums of each row's results [num_rows, width], added in float32 in their order, rounded to `dtype`.

    results: float32 [num_rows, num_places, width], contiguous. weights: float32, of each place; None: 1. last: float32
    [num_rows, width] of one more place.
    """
    num_rows, num_places, width = results.shape
    out = torch.empty(num_rows, width, dtype=dtype, device=results.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _add_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        results, last, weights, out, width, NUM_RESULTS=num_places, BLOCK=block,
        num_warps=max(1, min(4, block // 128)), enable_fp_fusion=False,  # a thread reads 16 bytes at a time
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("num_rows",))
def _group_kernel(
    group_of_row, order, starts, tile_groups, tile_rows, num_rows, HEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """One group: two passes over all rows, 8 bytes of each."""
    group = tl.program_id(0)
    start, count = group * 0, group * 0
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        groups = tl.load(group_of_row + rows, mask=rows < num_rows, other=2147483647)
        start += tl.sum((groups < group).to(tl.int32), 0)
        count += tl.sum((groups == group).to(tl.int32), 0)
    end = start + count
    tl.store(starts + group, start)
    tl.store(starts + group + 1, end)  # as the next group does
    place = start
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        is_own = (tl.load(group_of_row + rows, mask=rows < num_rows, other=-1) == group).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, rows, mask=is_own != 0)
        place += tl.sum(is_own, 0)
    first, next_first = tl.where(group > 0, start // HEIGHT + group, 0), end // HEIGHT + group + 1
    for tile in range(first, next_first):
        begin = start + (tile - first) * HEIGHT
        tl.store(tile_groups + tile, tl.where(begin < end, group, -1))
        tl.store(tile_rows + tile, begin)


@triton.jit
def _add_kernel(results, last, weights, out, width, NUM_RESULTS: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    NUM_PLACES: tl.constexpr = NUM_RESULTS if last is None else NUM_RESULTS + 1
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(NUM_PLACES):
        source = results + (row * NUM_RESULTS + place) * width
        if place == NUM_RESULTS:
            source = last + row * width
        values = tl.load(source + columns, mask=columns < width, other=0.0)
        if weights is not None:
            values *= tl.load(weights + row * NUM_PLACES + place)
        total += values
    tl.store(out + row * width + columns, total, mask=columns < width)
