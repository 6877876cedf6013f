"""Token sampling in Triton: the meaning is `quire.kernels.sampling.choose_tokens`'s, and nothing is sorted.

One program takes one row, in passes over its logits, which stay in the device's cache. Where top_k and top_p cut, it
halves the range of possible logits, read as integers that rise with them, until one value is left: at most 32 passes
that count tokens, or weigh them, and most rows need none. Of equal logits at the cut, those of the lowest ids stay. The
draw is a last pass in the order of ids.

Weights are float32, their sums float64 over tiles of float32 sums. So a draw with a number within about 1e-6 of the
border between two tokens may differ from the CPU's; the kernel's own result is always the same.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling import SamplingInputs

BLOCK = 4096
SETTINGS = np.dtype(  # a row of `SamplingInputs`
    [("top_ps", "f8"), ("uniforms", "f8"), ("temperatures", "f4"), ("log_min_ps", "f4"), ("top_ks", "i8")]
)


def choose_tokens(logits: Tensor, draws: SamplingInputs | None = None) -> Tensor:
    """Choose what `sampling.choose_tokens` chooses; the tokens [num_rows] int64 stay on the device."""
    if draws is None:
        return logits.argmax(dim=1)
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, f"logits {logits.dtype}"
    assert logits.stride(1) == 1, "logits with gaps"
    settings = np.empty(num_rows, SETTINGS)
    for name in SETTINGS.names or ():
        settings[name] = getattr(draws, name)
    table = torch.from_numpy(settings.view(np.float64))  # 32 bytes a row, in one upload
    if logits.is_cuda:
        table = table.pin_memory().to(logits.device, non_blocking=True)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _choose_kernel[(num_rows,)](
        logits, table, table.view(torch.float32), table.view(torch.int64), tokens, vocab_size, logits.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)), num_warps=8,
    )  # fmt: skip
    return tokens


@triton.jit
def _keys(logits, is_token):
    """Return int32 that rise with float32 logits; NaN above all, places without a token below all."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # 0 turns -0.0 into 0.0, which it equals
    keys = tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # noqa: PLR0124
    return tl.where(is_token, keys, -2147483648)


@triton.jit
def _logit(key):
    """Return the logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logits, highest, temperature, log_min_p):
    """Return exp((logits - highest) / temperature), 0 below min_p of the likeliest."""
    scaled = (logits - highest) / temperature
    return tl.where(scaled < log_min_p, 0.0, tl.exp(scaled))


@triton.jit
def _above(row, vocab_size, key, highest, temperature, log_min_p, BLOCK: tl.constexpr):
    """Return how many tokens have keys above `key`, and what they weigh."""
    count, weight = vocab_size * 0, (highest * 0.0).to(tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        is_above = (_keys(logits, ids < vocab_size) > key) & (ids < vocab_size)
        count += tl.sum(is_above.to(tl.int32), 0)
        weights = tl.where(is_above, _weights(logits, highest, temperature, log_min_p), 0.0)
        weight += tl.sum(weights, 0).to(tl.float64)
    return count, weight


@triton.jit
def _choose_kernel(
    all_logits, doubles, floats, ints, tokens, vocab_size, stride, BLOCK: tl.constexpr
):
    """One row. `doubles`, `floats` and `ints` are one table, SETTINGS a row."""
    index = tl.program_id(0).to(tl.int64)
    row = all_logits + index * stride
    top_p, uniform = tl.load(doubles + index * 4), tl.load(doubles + index * 4 + 1)
    temperature, log_min_p = tl.load(floats + index * 8 + 4), tl.load(floats + index * 8 + 5)
    top_k = tl.load(ints + index * 4 + 3)
    best, token = tl.full([], -2147483648, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _keys(tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")), ids < vocab_size)
        tile_best = tl.max(keys, 0)
        if tile_best > best:
            best = tile_best
            token = start + tl.min(tl.where(keys == tile_best, ids - start, BLOCK), 0)
    highest = _logit(best)
    if (temperature > 0) & (tl.abs(highest) < float("inf")):
        cut, num_equal, total = _cut(row, vocab_size, best, highest, temperature, log_min_p, top_k, top_p, BLOCK)
        token = _draw(row, vocab_size, cut, num_equal, uniform * total, highest, temperature, log_min_p, token, BLOCK)
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def _cut(row, vocab_size, best, highest, temperature, log_min_p, top_k, top_p, BLOCK: tl.constexpr):
    """Return a key above which all tokens stay, how many of those at it do, and what stays weighs."""
    cut, num_equal = tl.full([], -2147483648, tl.int32), vocab_size * 0  # above the least key are all tokens
    _num, total = _above(row, vocab_size, cut, highest, temperature, log_min_p, BLOCK)
    if top_k < vocab_size:  # the highest cut that leaves at least top_k at or above it: less than top_k above it
        low, high = cut.to(tl.int64), best.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            count, _weight = _above(row, vocab_size, middle.to(tl.int32), highest, temperature, log_min_p, BLOCK)
            low, high = tl.where(count < top_k, low, middle + 1), tl.where(count < top_k, middle, high)
        cut = high.to(tl.int32)
        count, weight = _above(row, vocab_size, cut, highest, temperature, log_min_p, BLOCK)
        num_equal = (top_k - count).to(tl.int32)
        total = weight + num_equal * _weights(_logit(cut), highest, temperature, log_min_p).to(tl.float64)
    if top_p < 1:  # the lowest cut above which less than the share lies: later tokens are not needed
        share = top_p * total
        low, high = cut.to(tl.int64), best.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            _num, weight = _above(row, vocab_size, middle.to(tl.int32), highest, temperature, log_min_p, BLOCK)
            low, high = tl.where(weight < share, low, middle + 1), tl.where(weight < share, middle, high)
        num_above, weight = _above(row, vocab_size, high.to(tl.int32), highest, temperature, log_min_p, BLOCK)
        own = _weights(_logit(high.to(tl.int32)), highest, temperature, log_min_p).to(tl.float64)
        needed = tl.maximum(tl.ceil((share - weight) / own), 1.0)
        limit = tl.where(high == cut.to(tl.int64), num_equal, vocab_size)  # of top_k
        needed = tl.where(needed < limit, needed, limit.to(tl.float64)).to(tl.int32)
        num_at, _weight = _above(row, vocab_size, (high - 1).to(tl.int32), highest, temperature, log_min_p, BLOCK)
        cut, num_equal = high.to(tl.int32), tl.minimum(needed, num_at - num_above)
        total = weight + num_equal * own
    return cut, num_equal, total


@triton.jit
def _draw(
    row, vocab_size, cut, num_equal, target, highest, temperature, log_min_p, token, BLOCK: tl.constexpr
):
    """Return the first token that stays at which the running weight, in the order of ids, passes `target`.

    Should rounding let none pass it: the last of positive weight.
    """
    before, num_seen = target * 0, vocab_size * 0
    start, is_found = vocab_size * 0, vocab_size * 0
    while (start < vocab_size) & (is_found == 0):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        keys = _keys(logits, ids < vocab_size)
        is_equal = ((keys == cut) & (ids < vocab_size)).to(tl.int32)
        num_before = num_seen + tl.cumsum(is_equal, 0) - is_equal
        stays = (keys > cut) | ((is_equal > 0) & (num_before < num_equal))
        weights = tl.where(stays, _weights(logits, highest, temperature, log_min_p), 0.0)
        sums = before + tl.cumsum(weights.to(tl.float64), 0)
        passing = tl.min(tl.where((sums > target) & (weights > 0), ids, vocab_size), 0)
        last = tl.max(tl.where(weights > 0, ids, -1), 0)
        is_found = (passing < vocab_size).to(tl.int32)
        token = tl.where(is_found > 0, passing, tl.where(last >= 0, last, token))
        before += tl.sum(weights.to(tl.float64), 0)
        num_seen += tl.sum(is_equal, 0)
        start += BLOCK
    return token
