"""Packed files with something wrong: bytes, the length, or a header that is sealed again after a change."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.arrays import address
from quire.extension import _kernels
from quire.model.checkpoints.packed_file import HEADER_AT, LENGTH_BYTES, MAGIC, PAGE_BYTES

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 8, 31, 64, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64, 10**400, 0.5),
    *(float("inf"), "", "x", "dense", "int8", "int4_a8", "int8_a8", "fp8", "codebook4", "float32", "bfloat16", "uint8"),
    *("int32", "minimums", "zero_points", "0" * 16, [], [0], [-1], [2**63], [2**40, 2**40], [1, 2, 3, 4, 5], ["a"], {}),
    {"a": 1},
]
SEALED_SHARE = 0.6


def spoil(path: Path, rng: random.Random) -> str:
    """Change a packed file; return what was done, for the report of a failure."""
    content = path.read_bytes()
    if rng.random() > SEALED_SHARE:
        return rng.choice([_octets, _octets, _cut, _extend])(path, content, rng)
    length = int.from_bytes(content[len(MAGIC) : len(MAGIC) + LENGTH_BYTES], "little")
    header = json.loads(content[HEADER_AT : HEADER_AT + length])
    data = content[HEADER_AT + length + -(HEADER_AT + length) % PAGE_BYTES :]
    done = [_change(header, rng) for _ in range(rng.randint(1, 2))]
    path.write_bytes(sealed(json.dumps(header).encode(), data))
    return ", ".join(done)


def sealed(header: bytes, data: bytes) -> bytes:
    """Return a file with the digest of its header, whatever that says."""
    octets = np.frombuffer(header, np.uint8)
    digest = _kernels.digest(address(octets), len(octets)).to_bytes(LENGTH_BYTES, "big")
    start = MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + digest + header
    return start + bytes(-len(start) % PAGE_BYTES) + data


def _change(header: Any, rng: random.Random) -> str:  # noqa: ANN401 (JSON)
    places = [*_places(header["records"])] if isinstance(header.get("records"), dict) else []
    container, key = rng.choice(places) if places and rng.random() < 0.95 else (header, rng.choice(list(header)))
    if isinstance(container, dict) and rng.random() < 0.2:
        del container[key]
        return f"no {key}"
    others = [inner[at] for inner, at in places if at == key]  # another record's
    container[key] = json.loads(json.dumps(rng.choice(others if others and rng.random() < 0.4 else JUNK)))
    return f"{key}: {container[key]!r:.60}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 (JSON)
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _octets(path: Path, content: bytes, rng: random.Random) -> str:
    changed = bytearray(content)
    places = [rng.randrange(HEADER_AT if rng.random() < 0.2 else len(content)) for _ in range(rng.randint(1, 3))]
    for place in places:
        changed[place] ^= rng.randint(1, 255)
    path.write_bytes(changed)
    return f"bytes {places}"


def _cut(path: Path, content: bytes, rng: random.Random) -> str:
    length = rng.choice([0, 7, HEADER_AT, 200, PAGE_BYTES, rng.randrange(len(content)), len(content) - 1])
    path.write_bytes(content[:length])
    return f"cut to {length} bytes"


def _extend(path: Path, content: bytes, rng: random.Random) -> str:
    path.write_bytes(content + bytes(rng.choice([1, 64, PAGE_BYTES])))
    return "longer"
