#!/usr/bin/env bash
# Packages: torch 2.13.0, on a CPU, beside ml_dtypes 0.6.0
# Expected: one rule for what a narrow dtype cannot hold, as in ml_dtypes and in the formats' papers: infinity where there is one, and
# NaN where there is none. A scale (e8m0, which has no sign) of a negative number is NaN, too.
# Seen: each dtype has its own rule. 1e9 and infinity are infinity in e5m2, NaN in e5m2fnuz and e4m3fnuz, and 448 in e4m3fn: an overflow
# that float16 or bfloat16 shows is a number again once keys, values or weights are stored so. e8m0 forgets the sign: -3 is 4.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 ml_dtypes==0.6.0 numpy==2.4.6
cat > range.py <<'PY'
import warnings

import ml_dtypes
import numpy as np
import torch

warnings.simplefilter("ignore")
values = np.array([1e9, np.inf, -3.0], np.float32)
seen = {}
for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"):
    torch_values = torch.from_numpy(values).to(getattr(torch, name)).float().tolist()
    seen[name] = [repr(value) for value in torch_values], [repr(float(value)) for value in values.astype(getattr(ml_dtypes, name))]
    print(f"{name}: 1e9, inf and -3 are {', '.join(seen[name][0])} in torch, {', '.join(seen[name][1])} in ml_dtypes")
assert seen["float8_e4m3fn"] == (["448.0", "448.0", "-3.0"], ["nan", "nan", "-3.0"]), "it is no longer so"
assert seen["float8_e5m2"] == (["inf", "inf", "-3.0"],) * 2, "it is no longer so"
assert seen["float8_e5m2fnuz"] == seen["float8_e4m3fnuz"] == (["nan", "nan", "-3.0"],) * 2, "it is no longer so"
assert [numbers[2] for numbers in seen["float8_e8m0fnu"]] == ["4.0", "nan"], "it is no longer so"
PY
venv/bin/python range.py
