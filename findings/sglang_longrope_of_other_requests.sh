#!/usr/bin/env bash
# Package: sglang 0.5.23 (the class Phi3LongRoPEScaledRotaryEmbedding of its wheel), torch 2.13.0
# Expected: a request's queries and keys are rotated by its own positions: LongRoPE (Phi-3 and Phi-4 with 128k) has two sets of
# divisors, for sequences up to the original length and for longer ones, and other requests of the batch choose none for it.
# Seen: one set is chosen for each batch. A single position past the original length, of whichever request, rotates all tokens of that
# step by the long divisors; alone, the same token is rotated by the short ones. A short request beside a long one gets queries that
# do not fit its cached keys, and writes a key that does not fit the others. Only the class is run, as the model runner calls it:
# positions of all tokens of a batch, end to end.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 sglang==0.5.23
cat > rotate.py <<'PY'
import ast
import glob
import math
import zipfile
from typing import List, Optional, Tuple

import torch
import torch.nn as nn

WHEEL = zipfile.ZipFile(glob.glob("sglang-*.whl")[0])
FOLDER, NAME = "sglang/srt/layers/rotary_embedding", "Phi3LongRoPEScaledRotaryEmbedding"
SIDE, ORIGINAL, LONGEST = 16, 4096, 131072


def defined(path, name, **names):
    """Return a function or class of the wheel as it stands there, without what its file imports."""
    found = next(node for node in ast.walk(ast.parse(WHEEL.read(path))) if getattr(node, "name", None) == name)
    exec(compile(ast.Module([found], []), path, "exec"), names)
    return names[name]


rotate = defined(f"{FOLDER}/utils.py", "rotate_neox", torch=torch)
kind = defined(f"{FOLDER}/rope_variant.py", NAME, torch=torch, nn=nn, math=math, List=List, Optional=Optional, Tuple=Tuple, rotate_neox=rotate)
half = SIDE // 2
rotary = kind(SIDE, SIDE, LONGEST, ORIGINAL, 10000, True, torch.float32, [1.0] * half, [1.0 + 4 * i for i in range(half)])
torch.manual_seed(0)
query, key = torch.randn(2, SIDE), torch.randn(2, SIDE)


def of_the_short_request(other_position):
    """Return the rotated query and key of a request's token at position 100, beside another request's token."""
    return [x[:1].flatten() for x in rotary(torch.tensor([100, other_position]), query.clone(), key.clone())]


alone = [x.flatten() for x in rotary(torch.tensor([100]), query[:1].clone(), key[:1].clone())]
found = {}
for position in (4000, 5000):
    beside = of_the_short_request(position)
    found[position] = max((one - other).abs().max().item() for one, other in zip(alone, beside))
    print(f"beside a token at {position}: query and key of the token at 100 are {found[position]:.3f} from those alone")
assert found[4000] == 0 and found[5000] > 0.1, "it is no longer so"
PY
venv/bin/python rotate.py
