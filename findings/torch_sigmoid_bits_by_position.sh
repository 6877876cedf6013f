#!/usr/bin/env bash
# Package: torch 2.13.0, on a CPU
# Expected: an element-wise function of a float32 value has the same bits wherever the value stands in a tensor. It is so for exp,
# tanh, erf, log1p and GELU.
# Seen: sigmoid, SiLU and softplus have other bits in the elements behind a call's last whole vectors (with AVX-512 those behind the
# last multiple of 32): 4 % of random values for sigmoid and SiLU, 15 % for softplus, with AVX2 as well. So a router that weighs
# experts by sigmoids may choose otherwise for the same row in another batch: batch-invariant products do not make a
# mixture of experts batch-invariant. In float64, rounded afterwards, no bit differed.
# Date: 2026-11-29
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > position.py <<'PY'
import torch
from torch.nn.functional import gelu, silu, softplus

torch.set_num_threads(1)
rows = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(1))


def share_that_differs(function):
    """Rows of six values: all in one call, and each in a call of its own."""
    return (function(rows) != torch.stack([function(row) for row in rows])).float().mean().item()


alike = {name: share_that_differs(getattr(torch, name)) for name in ("exp", "tanh", "erf")} | {"gelu": share_that_differs(gelu)}
alike["log1p"] = share_that_differs(lambda x: torch.log1p(x.abs()))
other = {"sigmoid": share_that_differs(torch.sigmoid), "silu": share_that_differs(silu), "softplus": share_that_differs(softplus)}
print(torch.backends.cpu.get_cpu_capability(), {name: f"{share:.2%}" for name, share in (alike | other).items()})
assert set(alike.values()) == {0.0}, alike
assert all(share > 0.001 for share in other.values()), other
in_float64 = share_that_differs(lambda x: x.double().sigmoid().float())
assert in_float64 == 0.0, in_float64
PY
venv/bin/python position.py
ATEN_CPU_CAPABILITY=avx2 venv/bin/python position.py
