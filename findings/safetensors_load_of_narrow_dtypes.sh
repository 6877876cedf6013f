#!/usr/bin/env bash
# Packages: safetensors 0.8.0, torch 2.13.0, NumPy 2.4.6
# Expected: safetensors.torch.load reads the bytes that safetensors.torch.save made, as load_file reads what save_file made.
# Seen: of the two dtypes of microscaled weights (MXFP4, NVFP4 and their scales) it reads neither: KeyError: 'F4' for float4_e2m1fn_x2
# and KeyError: 'F8_E8M0' for float8_e8m0fnu. load_file of the same bytes in a file reads both: the library has two tables of
# dtypes. A loader that fetches or deserializes bytes needs a file on the way.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check safetensors==0.8.0 torch==2.13.0 numpy==2.4.6
cat > narrow.py <<'PY'
import torch
from safetensors.torch import load, load_file, save, save_file

values = torch.arange(8, dtype=torch.uint8).view(2, 4)
seen = {}
for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
    tensors = {"w": values.view(dtype)}
    written = save(tensors)
    save_file(tensors, "w.safetensors")
    assert open("w.safetensors", "rb").read() == written
    assert torch.equal(load_file("w.safetensors")["w"].view(torch.uint8), values)
    try:
        seen[dtype] = str(load(written)["w"].dtype)
    except KeyError as fault:
        seen[dtype] = repr(fault)
    print(f"{dtype}: load_file reads it, load: {seen[dtype]}")
assert [*seen.values()] == ["torch.float8_e4m3fn", "KeyError('F8_E8M0')", "KeyError('F4')"], "it is no longer so"
PY
venv/bin/python narrow.py
