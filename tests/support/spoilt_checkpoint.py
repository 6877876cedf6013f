"""Quantized folders with something wrong: options, tensors, bytes or the length of a file."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
JUNK: list[object] = [
    *(None, True, False, 0, -1, 1, 2, 3, 4, 7, 8, 16, 32, 128, 2**16, 2**24, 2**31, 2**63, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "4", "-1", "\0", "\ud800", "group", "channel", "tensor"),
    *("int", "float", "gptq", "gptq_v2", "awq", "fp8", "gemm", "pack-quantized", "Linear", "lm_head", "re:(a*)*$"),
    *("re:.*", "re:(", "re:" + "(a|a)*" * 20 + "$", "re:" + "a" * 600, "128x128", "0x0", "-:.*", "static", "dynamic"),
    *([], [0], [-1, -1], [128, 128], [10**9, 10**9], [1, 1], [None], ["Linear"], ["re:.*_proj"], ["x" * 600]),
    *([[]], [["q_proj"]], ["q_proj"] * 20_000, {}, {"a": 1}, {"-:.*": {}}, {"+:.*": {"bits": 8}}, {"num_bits": 4}),
]
DTYPES = [torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip


def spoil(folder: Path, rng: random.Random) -> str:
    """Change one thing or more in a folder; return what was done, for the report of a failure."""
    kind = rng.choice([_options, _options, _tensor, _tensor, _tensor, _header, _cut])
    return kind(folder, rng)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 (JSON)
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value))[:40]:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _options(folder: Path, rng: random.Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    done = []
    for _ in range(rng.randint(1, 3)):
        quantization = config["quantization_config"]
        if not isinstance(quantization, dict):
            break
        container, key = rng.choice([*_places(quantization), (quantization, rng.choice(["dynamic", "x", "ignore"]))])
        container[key] = json.loads(json.dumps(rng.choice(JUNK)))
        done.append(f"{key}: {container[key]!r:.60}")
        if rng.random() < 0.2:
            del container[key]
    (folder / "config.json").write_text(json.dumps(config))
    return "options " + ", ".join(done)


def _tensor(folder: Path, rng: random.Random) -> str:
    tensors = load_file(folder / WEIGHTS)
    name = rng.choice([name for name in sorted(tensors) if ".layers." in name and "norm" not in name])
    change = rng.choice([_drop, _transpose, _flatten, _cast, _extend, _noise, _noise, _extremes])
    changed = change(tensors[name], rng)
    del tensors[name]
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / WEIGHTS)
    return f"{change.__name__} of {name}"


def _drop(tensor: Tensor, rng: random.Random) -> None:
    return None


def _transpose(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor.reshape(1, -1)


def _flatten(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.flatten()[: rng.randint(0, tensor.numel())]


def _cast(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.to(torch.float32).to(rng.choice(DTYPES))


def _extend(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor.reshape(1, 1)


def _noise(tensor: Tensor, rng: random.Random) -> Tensor:
    octets = tensor.contiguous().flatten().view(torch.uint8).clone()
    for _ in range(rng.choice([1, 3, 1000])):
        octets[rng.randrange(len(octets))] = rng.randrange(256)
    return octets.view(tensor.dtype).reshape(tensor.shape)


def _extremes(tensor: Tensor, rng: random.Random) -> Tensor:
    changed = tensor.clone()
    if tensor.is_floating_point():
        changed.flatten()[rng.randrange(tensor.numel())] = rng.choice([float("nan"), float("inf"), -1.0, 0.0])
        return changed
    limits = torch.iinfo(tensor.dtype)
    changed.view(-1)[rng.randrange(tensor.numel())] = rng.choice([limits.min, limits.max, -1, 0])
    return changed


def _header(folder: Path, rng: random.Random) -> str:
    content = bytearray((folder / WEIGHTS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    places = [rng.randrange(8 if rng.random() < 0.2 else length + 8) for _ in range(rng.randint(1, 3))]
    for place in places:
        content[place] = rng.choice(b'0123456789{}[]",:IF\xff\x00')
    (folder / WEIGHTS).write_bytes(content)
    return f"bytes {places}"


def _cut(folder: Path, rng: random.Random) -> str:
    content = (folder / WEIGHTS).read_bytes()
    length = rng.choice([0, 7, 9, 200, len(content) // 2, len(content) - 1])
    (folder / WEIGHTS).write_bytes(content[:length])
    return f"cut to {length} bytes"


Spoil = Callable[[Path, random.Random], str]
