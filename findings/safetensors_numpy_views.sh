#!/usr/bin/env bash
# Packages: safetensors 0.8.0 beside 0.7.0, with NumPy 2.4.6 and no other package
# Expected: safetensors.numpy writes the values of an array, as 0.7.0 does; or it refuses an array that is not contiguous, as
# safetensors.torch does ("You are trying to save a non contiguous tensor"), since it says that tensors have to be contiguous.
# Seen: 0.8.0 writes the memory behind the array under the array's shape, without a word: a transposed weight, as converters from
# JAX, TensorFlow and GPT-2's Conv1D make them, and one in Fortran's order are read as other numbers of the right shape and dtype
# (open upstream as issue 825).
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat > save.py <<'PY'
import sys

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3)
tensors = {"as it is": weight, "transposed": weight.T, "Fortran's order": np.asfortranarray(weight)}
save_file(tensors, "model.safetensors")
read, again = load_file("model.safetensors"), load(save(tensors))
found = {name: np.array_equal(read[name], array) for name, array in tensors.items()}
for name, array in tensors.items():
    print(f"{sys.argv[1]}, {name}: {array.tolist()} is read as {read[name].tolist()}")
    assert np.array_equal(read[name], again[name])
expected = {"as it is": True, "transposed": sys.argv[1] == "0.7.0", "Fortran's order": sys.argv[1] == "0.7.0"}
assert found == expected, "it is no longer so"
PY
for version in 0.7.0 0.8.0; do
  python3 -m venv "$version"
  "$version/bin/pip" --quiet --disable-pip-version-check install "safetensors==$version" numpy==2.4.6
  "$version/bin/python" save.py "$version"
done
