#!/usr/bin/env bash
# Packages: transformers 5.23.0 with pillow 13.0.0
# Expected: load_image, with which processors and servers read the images of a chat, gives one picture whether a PNG holds its grey
# levels as grey or as colours: both with 16 bits a value, as scanners, depth cameras and plots write them.
# Seen: the file of colours is scaled to 8 bits, and that of grey is clipped: `convert("RGB")` keeps levels up to 255 of 65,535 and
# makes all others white. A model sees a blank page, without an error or a warning, and answers.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check transformers==5.23.0 pillow==13.0.0 requests
cat > compare.py <<'PY'
import struct
import zlib

from transformers.image_utils import load_image

LEVELS = range(0, 65536, 257)  # of 16 bits: 0, 257, ... 65,535 are 0, 1, ... 255 of 8
COLOR_TYPES = {"grey": (0, 1), "colours": (2, 3)}  # a PNG's color type, and its values a pixel


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write(path, color_type, channels):
    """Write a row of 256 levels, dark to light."""
    row = b"\0" + b"".join(struct.pack(">H", level) * channels for level in LEVELS)
    header = struct.pack(">IIBBBBB", len(LEVELS), 1, 16, color_type, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b""))


found = {}
for name, kind in COLOR_TYPES.items():
    write(f"{name}.png", *kind)
    image = load_image(f"{name}.png")
    found[name] = [image.getpixel((x, 0))[0] for x in range(256)]
    print(f"{name}: {found[name][:3]} ... {found[name][127:130]} ... {found[name][-2:]}, {found[name].count(255)} of 256 levels are white")
assert found["colours"] == list(range(256))
assert found["grey"] == [0] + [255] * 255, "it is no longer so"
PY
venv/bin/python compare.py
