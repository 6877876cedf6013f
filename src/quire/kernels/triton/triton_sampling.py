"""Token sampling in Triton: the meaning is that of `quire.kernels.reference`; a row is read two to five times.

One program takes a tile of a row, and a row's tiles run side by side:

1. `_best_kernel`: the highest logit of each tile.
2. `_weigh_kernel`: the weights of each tile, summed; where top_k or top_p cuts, its tokens are also counted, in bins by
   how far below the highest logit a token is, in 1/32 of the temperature.
3. `_sum_kernel`, only where a row is cut: a bin's weights differ by 3 % at most, so its count bounds their sum; counts
   and the sum of all weights bound where the cuts lie. The weights of those bins alone are summed by bin.
4. `_collect_kernel`, only where a row is cut: the ids of the tokens in the bins in which the cuts may lie.
5. `_draw_kernel`, one program per row: finds the cuts among these by halving, and reads the one tile in which the draw
   lies.

A tile's tokens are counted in shared memory: an addition to global memory for each bin of a tile that has any, and for
each token near the cuts.

Weights are integers: 2**44 times the float32 weight, which is 1 for the highest logit. Their sums are exact, so neither
tiles nor the order in which programs end change a token. A row is ranked by orders: the key of the logit, then the
lower id.

If more than CAPACITY tokens lie where the cuts may, the row's program halves over the row instead: one pass for each
bit of the range in which their orders lie. Against the CPU a draw within about 1e-6 of the border between two tokens
may differ, since the weights are rounded otherwise.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.sampling import pack_settings
from quire.kernels.triton import card
from quire.kernels.triton.card import wait_for_inputs

BLOCK = 4096  # tokens of a tile
NUM_BINS, BINS_PER_UNIT = tl.constexpr(1024), tl.constexpr(32.0)  # up to exp(-32): lower weights are 0
CAPACITY = 4096  # tokens near the cuts that one program holds
UNIT = tl.constexpr(2.0**44)
MARGIN = tl.constexpr(1e-4)  # error of float32 exponentials of up to -32, with room to spare
LOWEST, HIGHEST = tl.constexpr(-(2**62)), tl.constexpr(2**62)  # below and above all orders
ID_BITS, LAST_ID = tl.constexpr(19), tl.constexpr(2**19 - 1)
MAX_VOCAB_SIZE = 2**19 - 1  # an int64 holds the sum of so many weights, and an order their ids


def choose_tokens(logits: Tensor, draws: NDArray[np.void] | Tensor | None = None) -> Tensor:
    """Choose what `sampling.choose_tokens` chooses; the tokens [num_rows] int64 stay on the device.

    With settings that are on the device, the launches follow from the shapes alone: they can be part of a graph.
    """
    if draws is None:
        return logits.argmax(dim=1)
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, f"logits {logits.dtype}"
    assert logits.stride(1) == 1, "logits with gaps"
    assert vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {vocab_size}, at most {MAX_VOCAB_SIZE} can be summed"
    is_cut = isinstance(draws, Tensor) or bool(((draws["top_ks"] < vocab_size) | (draws["top_ps"] < 1)).any())
    table = draws if isinstance(draws, Tensor) else torch.from_numpy(pack_settings(draws))
    if logits.is_cuda and not table.is_cuda:  # one upload
        table = table.pin_memory().to(logits.device, non_blocking=True)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    num_tiles = triton.cdiv(vocab_size, block)
    num_cut = num_rows if is_cut else 0

    def scratch(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=logits.device)

    bests, sums, tokens = scratch(num_rows * num_tiles), scratch(num_rows * num_tiles), scratch(num_rows)
    before_bins, before_cuts = scratch(num_cut * num_tiles), scratch(num_cut * num_tiles)
    bins = scratch(num_cut * (2 * NUM_BINS.value + 1)).zero_()  # each row: weights, counts; then all rows' candidates
    found = scratch(num_cut * CAPACITY, torch.int32)
    row = (logits, table, table.view(torch.float32), table.view(torch.int64), bests, vocab_size, logits.stride(0))
    tiles = {"NUM_TILES": triton.next_power_of_2(num_tiles), "BLOCK": block, "num_warps": 8}
    tiles |= card.launch_options(logits.device)  # for all launches but the first, which follows a memset
    grid, num_found = (num_rows, num_tiles), bins[num_cut * 2 * NUM_BINS.value :]
    _best_kernel[grid](logits, bests, vocab_size, logits.stride(0), BLOCK=block, num_warps=8)
    _weigh_kernel[grid](*row, sums, bins, num_tiles, **tiles)
    cut = (sums, before_bins, before_cuts, bins, num_found, found)
    if is_cut:
        _sum_kernel[grid](*row, sums, before_bins, bins, num_tiles, **tiles)
        _collect_kernel[grid](*row, *cut, num_tiles, CAPACITY=CAPACITY, **tiles)
    _draw_kernel[(num_rows,)](*row, *cut, tokens, num_tiles, CAPACITY=CAPACITY, **tiles)
    return tokens


@triton.jit
def _orders(logits, ids):
    """Return int64 that rise with float32 logits, and of equal ones with lower ids; NaN is above all."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # 0 turns -0.0 into 0.0, which it equals
    keys = tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124
    return (keys.to(tl.int64) << ID_BITS) + (ids ^ LAST_ID)


@triton.jit
def _logits(orders):
    """Return the float32 logits of orders: their upper bits, turned back from integers that sort alike."""
    keys = (orders >> ID_BITS).to(tl.int32)
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ids(orders):
    """Return the token ids of orders: their lower bits, inverted, so that a lower id sorts higher."""
    return ((orders & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def _weights(logits, highest, temperature, log_min_p):
    """Return UNIT * exp((logits - highest) / temperature) in int64, 0 below min_p of the likeliest, and the bins.

    Division is rounded correctly, so the bins fall where the logits rise.
    """
    scaled = tl.div_rn(logits - highest, temperature)
    weights = (tl.exp(scaled) * UNIT).to(tl.int64)
    bins = tl.minimum(-scaled * BINS_PER_UNIT, NUM_BINS - 1.0).to(tl.int32)
    return tl.where(scaled < log_min_p, 0, weights), bins


@triton.jit
def _row(floats, bests, index, num_tiles, NUM_TILES: tl.constexpr):
    """Return a row's highest logit, its token, temperature, log of min_p, and whether a token is drawn."""
    tiles = tl.arange(0, NUM_TILES)
    best = tl.max(tl.load(bests + index * num_tiles + tiles, mask=tiles < num_tiles, other=LOWEST), 0)
    temperature, log_min_p = tl.load(floats + index * 8 + 4), tl.load(floats + index * 8 + 5)
    highest = _logits(best)
    return highest, _ids(best), temperature, log_min_p, (temperature > 0) & (tl.abs(highest) < float("inf"))


@triton.jit
def _best_kernel(all_logits, bests, vocab_size, stride, BLOCK: tl.constexpr):
    """One tile: the order of its highest logit."""
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(all_logits + index * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    best = tl.max(tl.where(ids < vocab_size, _orders(logits, ids), LOWEST), 0)
    tl.store(bests + index * tl.num_programs(1) + tile, best)


@triton.jit
def _is_cut(doubles, ints, index, vocab_size):
    """Return whether top_k or top_p cuts a row, top_k, and top_p."""
    top_p, top_k = tl.load(doubles + index * 4), tl.load(ints + index * 4 + 3)
    return (top_k < vocab_size) | (top_p < 1), top_k, top_p


@triton.jit
def _sum_of_tiles(sums, index, num_tiles, NUM_TILES: tl.constexpr):
    """Return the sum of a row's tiles."""
    tiles = tl.arange(0, NUM_TILES)
    return tl.sum(tl.load(sums + index * num_tiles + tiles, mask=tiles < num_tiles, other=0), 0)


@triton.jit
def _weigh_kernel(
    all_logits, doubles, floats, ints, bests, vocab_size, stride, sums, bins, num_tiles,
    NUM_TILES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile: what its tokens weigh, and their number by bins. The settings are `doubles`, `floats` and `ints`."""
    wait_for_inputs(OVERLAPS)
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest, _token, temperature, log_min_p, is_drawn = _row(floats, bests, index, num_tiles, NUM_TILES)
    if is_drawn:
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(all_logits + index * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights, places = _weights(logits, highest, temperature, log_min_p)
        tl.store(sums + index * num_tiles + tile, tl.sum(weights, 0))
        is_cut, _top_k, _top_p = _is_cut(doubles, ints, index, vocab_size)
        if is_cut:
            counts = tl.histogram(tl.where(weights > 0, places, 0), NUM_BINS, mask=weights > 0).to(tl.int64)
            of_row = bins + (index * 2 + 1) * NUM_BINS + tl.arange(0, NUM_BINS)
            tl.atomic_add(of_row, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _k_bin(counts, top_k):
    """Return the bin in which top_k cuts, NUM_BINS if it cuts nothing; counts: of tokens up to each bin."""
    return tl.where(tl.max(counts, 0) > top_k, tl.sum((counts < top_k).to(tl.int32), 0), NUM_BINS)


@triton.jit
def _bounds(bins, index, top_k, top_p, total):
    """Return the first and the last bin of which `_cuts` has to know the weights, by the numbers of tokens in bins.

    total: the weight of all tokens. A token of bin b weighs between exp(-(b + 1) / 32) and exp(-b / 32), times UNIT.
    """
    places = tl.arange(0, NUM_BINS)
    counts = tl.load(bins + (index * 2 + 1) * NUM_BINS + places)
    k_bin = _k_bin(tl.cumsum(counts, 0), top_k)
    depths = places.to(tl.float32) / BINS_PER_UNIT
    lightest = (tl.exp(-depths - 1 / BINS_PER_UNIT) * ((1 - MARGIN) * UNIT)).to(tl.int64)
    lightest = tl.where(places < NUM_BINS - 1, lightest, 0)  # the last bin has all that lies deeper
    heaviest = tl.minimum(tl.exp(-depths) * ((1 + MARGIN) * UNIT), UNIT).to(tl.int64)
    at_least, at_most = tl.cumsum(counts * lightest, 0), tl.cumsum(counts * heaviest, 0)
    behind_least, behind_most = tl.max(at_least, 0) - at_least, tl.max(at_most, 0) - at_most
    at_least, at_most = tl.maximum(at_least, total - behind_most), tl.minimum(at_most, total - behind_least)
    least = tl.max(tl.where(places < k_bin, at_least, 0), 0)
    most = tl.min(tl.where(places >= k_bin, at_most, total), 0)
    first = tl.minimum(tl.sum((at_most.to(tl.float64) < top_p * least.to(tl.float64)).to(tl.int32), 0), k_bin)
    last = tl.minimum(tl.sum((at_least.to(tl.float64) < top_p * most.to(tl.float64)).to(tl.int32), 0), k_bin)
    return tl.where(top_p < 1, first, k_bin), tl.where(k_bin < NUM_BINS, k_bin, last)


@triton.jit
def _sum_kernel(
    all_logits, doubles, floats, ints, bests, vocab_size, stride, sums, before_bins, bins, num_tiles,
    NUM_TILES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile of a row that is cut: what its tokens weigh in each bin near the cuts, and together in those before."""
    wait_for_inputs(OVERLAPS)
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest, _token, temperature, log_min_p, is_drawn = _row(floats, bests, index, num_tiles, NUM_TILES)
    is_cut, top_k, top_p = _is_cut(doubles, ints, index, vocab_size)
    if is_drawn & is_cut:
        first, last = _bounds(bins, index, top_k, top_p, _sum_of_tiles(sums, index, num_tiles, NUM_TILES))
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(all_logits + index * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights, places = _weights(logits, highest, temperature, log_min_p)
        tl.store(before_bins + index * num_tiles + tile, tl.sum(tl.where(places < first, weights, 0), 0))
        is_near = (weights > 0) & (places >= first) & (places <= last)
        tl.atomic_add(bins + index * 2 * NUM_BINS + places, weights, mask=is_near, sem="relaxed")


@triton.jit
def _cuts(bins, index, top_k, top_p, before, total):
    """Return where the cuts lie, of tokens that weigh anything.

    The bin of top_k's, NUM_BINS if it cuts nothing, with the count and the weight above it; the first and the last bin
    in which top_p's may lie, with the weight above the first. Without top_p all is top_k's. before, total: the weight
    before the bins that `_sum_kernel` has summed, and that of all; those bins contain the cuts.
    """
    places = tl.arange(0, NUM_BINS)
    weights = before + tl.cumsum(tl.load(bins + index * 2 * NUM_BINS + places), 0)
    counts = tl.cumsum(tl.load(bins + (index * 2 + 1) * NUM_BINS + places), 0)
    k_bin = _k_bin(counts, top_k)
    num_above = tl.max(tl.where(counts < top_k, counts, 0), 0)
    least = tl.where(k_bin < NUM_BINS, tl.max(tl.where(counts < top_k, weights, 0), 0), total)
    most = tl.min(tl.where(places >= k_bin, weights, total), 0)
    first = tl.minimum(tl.sum((weights.to(tl.float64) < top_p * least.to(tl.float64)).to(tl.int32), 0), k_bin)
    last = tl.minimum(tl.sum((weights.to(tl.float64) < top_p * most.to(tl.float64)).to(tl.int32), 0), k_bin)
    first, last = tl.where(top_p < 1, first, k_bin), tl.where(top_p < 1, last, k_bin)
    above_first = tl.max(tl.where(places < first, weights, 0), 0)
    return k_bin, num_above, least, first, last, above_first


@triton.jit
def _collect_kernel(
    all_logits, doubles, floats, ints, bests, vocab_size, stride, sums, before_bins, before_cuts, bins, num_found,
    found, num_tiles, CAPACITY: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One tile of a row that is cut: append the ids near the cuts to `found`, and sum what is above all of them."""
    wait_for_inputs(OVERLAPS)
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest, _token, temperature, log_min_p, is_drawn = _row(floats, bests, index, num_tiles, NUM_TILES)
    is_cut, top_k, top_p = _is_cut(doubles, ints, index, vocab_size)
    if is_drawn & is_cut:
        before = _sum_of_tiles(before_bins, index, num_tiles, NUM_TILES)
        total = _sum_of_tiles(sums, index, num_tiles, NUM_TILES)
        k_bin, _num, _least, first, last, _above = _cuts(bins, index, top_k, top_p, before, total)
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(all_logits + index * stride + ids, mask=ids < vocab_size, other=float("-inf"))
        weights, places = _weights(logits, highest, temperature, log_min_p)
        tl.store(before_cuts + index * num_tiles + tile, tl.sum(tl.where(places < first, weights, 0), 0))
        is_near = (weights > 0) & (((places >= first) & (places <= last)) | (places == k_bin))
        num = tl.sum(is_near.to(tl.int32), 0)
        if num > 0:  # any order
            start = tl.atomic_add(num_found + index, num.to(tl.int64), sem="relaxed")
            at = start + tl.cumsum(is_near.to(tl.int32), 0) - 1
            tl.store(found + index * CAPACITY + at, ids, mask=is_near & (at < CAPACITY))


@triton.jit
def _draw_kernel(
    all_logits, doubles, floats, ints, bests, vocab_size, stride, sums, before_bins, before_cuts, bins, num_found,
    found, tokens, num_tiles, CAPACITY: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row: cut, and draw."""
    wait_for_inputs(OVERLAPS)
    index = tl.program_id(0).to(tl.int64)
    row = all_logits + index * stride
    highest, token, temperature, log_min_p, is_drawn = _row(floats, bests, index, num_tiles, NUM_TILES)
    is_cut, top_k, top_p = _is_cut(doubles, ints, index, vocab_size)
    uniform = tl.load(doubles + index * 4 + 1)
    if is_drawn:
        if not is_cut:
            cut = top_k * 0 + LOWEST
            tiles = tl.arange(0, NUM_TILES)
            weights = tl.load(sums + index * num_tiles + tiles, mask=tiles < num_tiles, other=0)
            target = _target(uniform, tl.sum(weights, 0))
            through = tl.cumsum(weights, 0)
            tile = tl.minimum(tl.sum((through <= target).to(tl.int32), 0), num_tiles - 1)
            before = tl.max(tl.where(tiles < tile, through, 0), 0)
        else:
            summed = _sum_of_tiles(before_bins, index, num_tiles, NUM_TILES)
            total = _sum_of_tiles(sums, index, num_tiles, NUM_TILES)
            count = tl.load(num_found + index)
            if count <= CAPACITY:
                cut, target, tile, before = _cut_near(
                    row, before_cuts + index * num_tiles, bins, found + index * CAPACITY, count, index, num_tiles,
                    top_k, top_p, summed, total, uniform, highest, temperature, log_min_p, CAPACITY, BLOCK,
                )  # fmt: skip
            else:
                cut, target, tile, before = _cut_by_halves(
                    row, bins, index, vocab_size, top_k, top_p, summed, total, uniform, highest, temperature,
                    log_min_p, BLOCK,
                )  # fmt: skip
        is_found = tile * 0
        while (tile < num_tiles) & (is_found == 0):
            ids = tile * BLOCK + tl.arange(0, BLOCK)
            logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
            weights, _bins = _weights(logits, highest, temperature, log_min_p)
            weights = tl.where(_orders(logits, ids) >= cut, weights, 0)
            passing = tl.min(tl.where((before + tl.cumsum(weights, 0) > target) & (weights > 0), ids, vocab_size), 0)
            is_found = (passing < vocab_size).to(tl.int32)
            token = tl.where(is_found > 0, passing, token)
            before += tl.sum(weights, 0)
            tile += 1
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def _target(uniform, total):
    """Return the integer that the running weight must pass."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _cut_near(
    row, before_cuts, bins, found, count, index, num_tiles, top_k, top_p, summed, total, uniform, highest, temperature,
    log_min_p, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the lowest order that stays, the draw's target, its tile, and what stays before that tile."""
    k_bin, num_above, above_k, _first, last, above_first = _cuts(bins, index, top_k, top_p, summed, total)
    at = tl.arange(0, CAPACITY)
    ids = tl.load(found + at, mask=at < count, other=0)
    logits = tl.load(row + ids, mask=at < count, other=float("-inf"))
    orders = tl.where(at < count, _orders(logits, ids), LOWEST)
    weights, places = _weights(logits, highest, temperature, log_min_p)
    best, cut = tl.max(orders, 0), tl.min(tl.where(at < count, orders, HIGHEST), 0)
    if k_bin < NUM_BINS:  # the highest cut that leaves top_k
        of_bin, high = tl.where(places == k_bin, orders, LOWEST), best
        while cut < high:
            middle = (cut + high + 1) >> 1
            is_enough = num_above + tl.sum((of_bin >= middle).to(tl.int64), 0) >= top_k
            cut, high = tl.where(is_enough, middle, cut), tl.where(is_enough, high, middle - 1)
        total = above_k + tl.sum(tl.where(of_bin >= cut, weights, 0), 0)
    if top_p < 1:  # the highest cut that leaves the share
        share, high = top_p * total.to(tl.float64), best
        near = tl.where(places <= last, weights, 0)
        while cut < high:
            middle = (cut + high + 1) >> 1
            weight = above_first + tl.sum(tl.where(orders >= middle, near, 0), 0)
            is_enough = weight.to(tl.float64) >= share
            cut, high = tl.where(is_enough, middle, cut), tl.where(is_enough, high, middle - 1)
        total = above_first + tl.sum(tl.where(orders >= cut, near, 0), 0)
    cut = tl.where(count > 0, cut, LOWEST)
    weights = tl.where(orders >= cut, weights, 0)
    target = _target(uniform, total)
    tile, before, is_found = num_tiles * 0, total * 0, num_tiles * 0
    for number in range(num_tiles):
        own = tl.load(before_cuts + number) + tl.sum(tl.where(ids // BLOCK == number, weights, 0), 0)
        is_found = tl.where(before + own > target, 1, is_found)
        before = tl.where(is_found > 0, before, before + own)
        tile = tl.where(is_found > 0, tile, number + 1)
    return cut, target, tile, before


@triton.jit
def _above(row, vocab_size, cut, highest, temperature, log_min_p, BLOCK: tl.constexpr):
    """Return how many tokens that weigh anything have orders from `cut` on, and their weight."""
    num, weight = cut * 0, cut * 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        weights, _bins = _weights(logits, highest, temperature, log_min_p)
        weights = tl.where(_orders(logits, ids) >= cut, weights, 0)
        num += tl.sum((weights > 0).to(tl.int64), 0)
        weight += tl.sum(weights, 0)
    return num, weight


@triton.jit
def _cut_by_halves(
    row, bins, index, vocab_size, top_k, top_p, summed, total, uniform, highest, temperature, log_min_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return what `_cut_near` returns, before the first tile. Halves the orders between highest and lowest."""
    k_bin, _num, _weight, _first, last, _above_first = _cuts(bins, index, top_k, top_p, summed, total)
    deepest = tl.where(k_bin < NUM_BINS, k_bin, last)
    cut, best = top_k * 0 + HIGHEST, top_k * 0 + LOWEST
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        weights, places = _weights(logits, highest, temperature, log_min_p)
        is_near, orders = (weights > 0) & (places <= deepest), _orders(logits, ids)
        cut = tl.minimum(cut, tl.min(tl.where(is_near, orders, HIGHEST), 0))
        best = tl.maximum(best, tl.max(tl.where(is_near, orders, LOWEST), 0))
    if k_bin < NUM_BINS:
        high = best
        while cut < high:
            middle = (cut + high + 1) >> 1
            num, _weight = _above(row, vocab_size, middle, highest, temperature, log_min_p, BLOCK)
            cut, high = tl.where(num >= top_k, middle, cut), tl.where(num >= top_k, high, middle - 1)
        _num, total = _above(row, vocab_size, cut, highest, temperature, log_min_p, BLOCK)
    if top_p < 1:
        share, high = top_p * total.to(tl.float64), best
        while cut < high:
            middle = (cut + high + 1) >> 1
            _num, weight = _above(row, vocab_size, middle, highest, temperature, log_min_p, BLOCK)
            reaches = weight.to(tl.float64) >= share
            cut, high = tl.where(reaches, middle, cut), tl.where(reaches, high, middle - 1)
        _num, total = _above(row, vocab_size, cut, highest, temperature, log_min_p, BLOCK)
    return cut, _target(uniform, total), k_bin * 0, total * 0
