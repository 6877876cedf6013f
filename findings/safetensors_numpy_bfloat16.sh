#!/usr/bin/env bash
# safetensors 0.8.0, with NumPy 2.4.6 and no other package: a tensor of bfloat16.
#
# Expected: safe_open(framework="np") opens a file and returns each tensor that it lists, or says that
#   NumPy has no such dtype, before a caller has planned with it.
# Seen: names, shapes and dtypes of all tensors are told; reading one of bfloat16, most of today's weights, is
#   "TypeError: data type 'bfloat16' not understood". Once a program has imported ml_dtypes anywhere, the same call works: the dtype's name
#   is looked up in NumPy's registry.
# Date: 2026-11-29
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.5.4

cat > read.py <<'EOF'
import pathlib

from safetensors import safe_open

header = b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'.ljust(56)
content = len(header).to_bytes(8, "little") + header + bytes([0x80, 0x3F, 0x00, 0x40])
pathlib.Path("a.safetensors").write_bytes(content)


def read():
    with safe_open("a.safetensors", framework="np") as file:
        assert file.get_slice("a").get_dtype() == "BF16"
        try:
            return repr(file.get_tensor("a"))
        except TypeError as error:
            return f"TypeError: {error}"


alone = read()
import ml_dtypes  # noqa: E402, F401

beside = read()
print("NumPy alone:", alone)
print("with ml_dtypes imported:", beside)
assert "not understood" in alone
assert "bfloat16" in beside and "TypeError" not in beside
EOF
venv/bin/python read.py
