"""GGUF files with something wrong: metadata, the vocabulary, the tensor table, bytes or the length of the file."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gguf_files import TYPE_IDS, Stored, write_gguf

Contents = tuple[dict[str, Any], dict[str, Stored]]
JUNK: list[Any] = [
    *(True, False, 0, 1, 2, 3, 7, 31, 32, 33, 48, 255, 256, 2**16, 2**24, 2**31, 2**32 - 1),
    *(0.5, -0.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), "", "x", "gpt2", "llama", "none", "yarn", "qwen2"),
    *("{{ 1/0 }}", "{% for", "smollm", "tekken", "a b", "\0", "é" * 70_000, [], [0], [1, 2], [0.5], ["a"], ["a b"]),
    *([-1], ["a"] * 400, ["a b"] * 400, [3] * 400, [float("nan")] * 400, [str(i) for i in range(400)]),
]
INTEGERS = [0, 1, 2, 4, 8, 9, 12, 13, 31, 33, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
KEYS = ["general.alignment", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.sliding_window",
        "llama.expert_count", "split.count", "tokenizer.huggingface.json", "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id", "llama.rope.scale_linear"]  # fmt: skip


def spoil(whole: Contents, path: Path, rng: random.Random) -> str:
    """Write contents with one thing wrong or more; return what was done, for the report of a failure."""
    metadata, tensors = dict(whole[0]), dict(whole[1])
    kinds: list[Callable[[], str]] = [
        *[lambda: _metadata(metadata, rng)] * 3, *[lambda: _vocabulary(metadata, rng)] * 2,
        *[lambda: _tensor(tensors, rng)] * 3,
    ]  # fmt: skip
    done = rng.choice(kinds)() if rng.random() < 0.6 else ""
    write_gguf(path, metadata, tensors)
    if done:
        return done
    return rng.choice([_octets, _octets, _integers, _integers, _cut])(path, rng)


def _metadata(metadata: dict[str, Any], rng: random.Random) -> str:
    done = []
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*metadata, *KEYS])
        metadata[key] = rng.choice(JUNK)
        done.append(f"{key}: {metadata[key]!r:.60}")
        if rng.random() < 0.2:
            del metadata[key]
    return "metadata " + ", ".join(done)


def _vocabulary(metadata: dict[str, Any], rng: random.Random) -> str:
    key = rng.choice([key for key, value in metadata.items() if isinstance(value, list)])
    items = list(metadata[key])
    place = rng.randrange(len(items))
    others = [each for each in JUNK if type(each) is type(items[0])]
    change = rng.choice(["drop", "copy", "replace", "cut", "repeat"])
    if change == "drop":
        del items[place]
    elif change == "copy":
        items[place] = rng.choice(items)
    elif change == "replace":
        items[place] = rng.choice(others)
    else:
        items = items[:place] if change == "cut" else items * 2
    metadata[key] = items
    return f"{change} item {place} of {key}"


def _tensor(tensors: dict[str, Stored], rng: random.Random) -> str:
    name = rng.choice(list(tensors))
    kind, shape, stored = tensors.pop(name)
    change = rng.choice(["drop", "rename", "type", "shape", "noise", "noise", "empty"])
    if change == "rename":
        tensors[rng.choice([name + "x", "x" * 127, "blk.-1.attn_q.weight", "rope_freqs.weight"])] = kind, shape, stored
    elif change == "type":
        tensors[name] = rng.choice([*TYPE_IDS, "no type"]), shape, stored
    elif change == "shape":
        shapes = [shape[::-1], shape[:1], (1, *shape), (1,) * 4, (*shape[:-1], 2 * shape[-1]), (2**40,), (3,), (0, 1)]
        tensors[name] = kind, rng.choice(shapes), stored
    elif change == "noise":
        octets = bytearray(stored)
        for _ in range(rng.choice([1, 3, 1000])):
            octets[rng.randrange(len(octets))] = rng.choice([rng.randrange(256), 0x7C, 0xFF])
        tensors[name] = kind, shape, bytes(octets)
    elif change == "empty":
        tensors[name] = kind, shape, b""
    return f"{change} of {name}"


def _octets(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = [rng.randrange(24 if rng.random() < 0.2 else len(content)) for _ in range(rng.randint(1, 3))]
    for place in places:
        content[place] = rng.choice([rng.randrange(256), 0, 0xFF])
    path.write_bytes(content)
    return f"bytes {places}"


def _integers(path: Path, rng: random.Random) -> str:
    """Write an extreme where a count, a length, a type or an offset may be: behind a name."""
    content = bytearray(path.read_bytes())
    names = [b"general.", b"llama.", b"tokenizer.", b"blk.", b"token_embd", b"output"]
    starts = [place for name in names if (place := content.find(name, rng.randrange(len(content)))) >= 0] or [8]
    place = rng.choice([rng.choice(starts) + rng.randint(-8, 60), rng.choice([4, 8, 16])])
    value, size = rng.choice(INTEGERS), rng.choice([4, 8])
    octets = struct.pack("<Q", value)[:size]
    content[place : place + size] = octets
    path.write_bytes(content)
    return f"{octets.hex()} at byte {place}"


def _cut(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    length = rng.choice([0, 3, 7, 9, 20, 200, rng.randrange(len(content)), len(content) // 2, len(content) - 1])
    path.write_bytes(content[:length])
    return f"cut to {length} bytes"
