#!/usr/bin/env bash
# Packages: triton 3.7.1 (TRITON_INTERPRET=1), torch 2.13.0
# Expected: a kernel in the interpreter stores what its types say: a float32 becomes bfloat16 or float8 by rounding to the nearest, ties to
# even, NaN stays NaN, and tl.maximum, with its default of propagate_nan=PropagateNan.NONE, gives the operand that is a number.
# Seen: a number that float8 rounds up to a power of two loses the carry: 1.98 is 1 in e4m3 and in e5m2. A tie goes away from zero (17 is 18
# in e4m3); in e4m3 infinity is 256 and NaN is 384. bfloat16 is cut off, not rounded. tl.maximum of a number and NaN is NaN, while tl.max
# of both is the number. What a quantized cache holds in the interpreter is not what it would hold on a card.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > narrow.py <<'PY'
import math

import torch
import triton
import triton.language as tl


@triton.jit
def cast(numbers, narrow, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(narrow + at, tl.load(numbers + at).to(narrow.dtype.element_ty))


@triton.jit
def largest(numbers, pairs, whole, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(numbers + at)
    tl.store(pairs + at, tl.maximum(x, tl.zeros_like(x)))
    tl.store(whole, tl.max(x, 0))


NUMBERS = torch.tensor([1.5, 17.0, 1.98, math.inf, math.nan, 1.01171875, 1.015, -3.0])
seen = {}
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
    narrow = torch.zeros(8, dtype=dtype)
    cast[(1,)](NUMBERS, narrow, SIZE=8)
    seen[dtype] = narrow.float().tolist()
    print(dtype)
    for number, found, right in zip(NUMBERS.tolist(), seen[dtype], NUMBERS.to(dtype).float().tolist()):
        print(f"    {number:.9g}: {found:.9g} in the interpreter, {right:.9g} in PyTorch")
pairs, whole = torch.zeros(2), torch.zeros(1)
largest[(1,)](torch.tensor([math.nan, 3.0]), pairs, whole, SIZE=2)
print(f"tl.maximum of 0 and NaN: {pairs[0]}; tl.max of 3 and NaN: {whole[0]}")
assert seen[torch.float8_e4m3fn][:5] == [1.5, 18.0, 1.0, 256.0, 384.0] and seen[torch.float8_e5m2][2] == 1.0, "it is no longer so"
assert seen[torch.bfloat16][5:] == [1.0078125, 1.0078125, -3.0], "it is no longer so"
assert math.isnan(pairs[0]) and whole[0] == 3.0, "it is no longer so"
PY
TRITON_INTERPRET=1 venv/bin/python narrow.py
