"""Folders of a tiny Llama with quantized weights, written by the formats' definitions, and their dequantized twins."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

WIDTH, HEADS, KV_HEADS, INNER, LAYERS, VOCAB = 64, 4, 2, 104, 2, 99
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
KV_WIDTH = WIDTH // HEADS * KV_HEADS
LAYER_LINEARS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KV_WIDTH, WIDTH),
    "self_attn.v_proj": (KV_WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


class Module(NamedTuple):
    """Tensors of a quantized module by the ends of their names, and the values that they stand for, float32."""

    tensors: dict[str, Tensor]
    values: Tensor


Quantize = Callable[[np.random.Generator, int, int], Module]  # of a module of some outputs and inputs


class Pair(NamedTuple):
    """A quantized folder and its twin of floats; `values` are those of quantized modules, float32."""

    folder: Path
    twin: Path
    values: dict[str, Tensor]


def linears() -> Iterator[tuple[str, int, int]]:
    """Yield the name, outputs and inputs of every linear layer but the head."""
    for layer in range(LAYERS):
        for name, shape in LAYER_LINEARS.items():
            yield f"model.layers.{layer}.{name}", *shape


def write_pair(
    parent: Path,
    quantize: Mapping[str, Quantize] | Quantize,
    quantization_config: object,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_quantized_head: bool = False,
) -> Pair:
    """Write both folders. `quantize`: of all modules, or by the last part of their names; others stay dense."""
    rng = np.random.default_rng(0)
    config = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch.")}
    floats = {name: tensor.to(dtype) for name, tensor in _kept(rng).items()}
    stored, twin, values = dict(floats), dict(floats), dict[str, Tensor]()
    modules = [*linears(), *([("lm_head", VOCAB + 5, WIDTH)] if has_quantized_head else [])]
    if has_quantized_head:  # 104 rows: multiples of 8
        config["vocab_size"] = VOCAB + 5
        stored["model.embed_tokens.weight"] = twin["model.embed_tokens.weight"] = _matrix(rng, VOCAB + 5, WIDTH, dtype)
        stored.pop("lm_head.weight")
    for name, num_rows, width in modules:
        own = quantize.get(name.rpartition(".")[2]) if isinstance(quantize, Mapping) else quantize
        if own is None:
            stored[f"{name}.weight"] = twin[f"{name}.weight"] = _matrix(rng, num_rows, width, dtype)
            continue
        module = own(rng, num_rows, width)
        stored |= {f"{name}.{end}": tensor for end, tensor in module.tensors.items()}
        values[name], twin[f"{name}.weight"] = module.values, module.values.to(dtype)
    with_format = {**config, "quantization_config": quantization_config}
    return Pair(_write(parent / "quantized", with_format, stored), _write(parent / "twin", config, twin), values)


def _write(folder: Path, config: object, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _kept(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the tensors that are never quantized."""
    norms = [f"model.layers.{layer}.{end}" for layer in range(LAYERS)
             for end in ("input_layernorm", "post_attention_layernorm")]  # fmt: skip
    tensors = {f"{name}.weight": torch.from_numpy(rng.random(WIDTH) + 0.5) for name in [*norms, "model.norm"]}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = _matrix(rng, VOCAB, WIDTH, torch.float32)
    return tensors


def _matrix(rng: np.random.Generator, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(rng.standard_normal((num_rows, width)) * width**-0.5).to(dtype)


def packed(elements: NDArray[np.integer], bits: int) -> Tensor:
    """Return int32 words of consecutive elements of a row, low bits first; the last word of a row is filled up."""
    per_word = 32 // bits
    elements = np.pad(elements, ((0, 0), (0, -elements.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((len(elements), elements.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= elements[:, place::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


class Integers(NamedTuple):
    """Random integers of a module: a value is scale * (element - zero)."""

    elements: NDArray[np.int64]  # [num_rows, width], unsigned
    zeros: NDArray[np.int64]     # [num_rows, groups]
    scales: Tensor               # [num_rows, groups]
    group_of: NDArray[np.int64]  # [width]
    values: Tensor


def random_integers(
    rng: np.random.Generator,
    num_rows: int,
    width: int,
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool,
    is_ordered: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Integers:
    """Return elements of all sizes. `is_ordered`: groups are not of consecutive inputs, the same for every width."""
    size, half = width if group_size == -1 else group_size, 1 << (bits - 1)
    groups = -(-width // size)
    group_of = np.arange(width) // size
    if is_ordered:
        group_of = np.random.default_rng(width).permutation(group_of)
    elements = rng.integers(0, 2 * half, (num_rows, width))
    zeros = np.full((num_rows, groups), half) if is_symmetric else rng.integers(0, 2 * half, (num_rows, groups))
    scales = torch.from_numpy((rng.random((num_rows, groups)) + 0.5) * width**-0.5 / half).to(scale_dtype)
    whole = torch.from_numpy((elements - zeros[:, group_of]).astype(np.float32))
    return Integers(elements, zeros, scales, group_of, scales.float()[:, group_of] * whole)


def gptq(bits: int, group_size: int, *, sym: bool = True, desc_act: bool = False, version: int = 1) -> Quantize:
    """Return the quantizer of AutoGPTQ's layout; version 1 stores zero - 1 in as many bits as there are."""

    def quantize(rng: np.random.Generator, num_rows: int, width: int) -> Module:
        found = random_integers(rng, num_rows, width, bits, group_size, is_symmetric=sym, is_ordered=desc_act)
        zeros = found.zeros - 1 if version == 1 else found.zeros
        tensors = {
            "qweight": packed(found.elements, bits).T,
            "qzeros": packed((zeros % (1 << bits)).T, bits),
            "scales": found.scales.T,
            "g_idx": torch.from_numpy(found.group_of.astype(np.int32)),
        }
        return Module(tensors, found.values)

    return quantize


def gptq_config(
    bits: int, group_size: int, *, sym: bool = True, desc_act: bool = False, version: int = 1, **more: object
) -> dict[str, object]:
    """Return the quantization_config of a folder of `gptq`."""
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "damp_percent": 0.1, "true_sequential": True,
        "lm_head": False, **more,
    }  # fmt: skip


def awq(group_size: int) -> Quantize:
    """Return the quantizer of AutoAWQ's GEMM layout: outputs 0 2 4 6 1 3 5 7 of eight in a word, low bits first."""

    def words(elements: NDArray[np.int64]) -> Tensor:
        in_order = elements.reshape(len(elements), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return packed(in_order.reshape(elements.shape), 4)

    def quantize(rng: np.random.Generator, num_rows: int, width: int) -> Module:
        found = random_integers(rng, num_rows, width, 4, group_size, is_symmetric=False)
        tensors = {"qweight": words(found.elements.T), "qzeros": words(found.zeros.T), "scales": found.scales.T}
        return Module(tensors, found.values)

    return quantize


def awq_config(group_size: int, **more: object) -> dict[str, object]:
    """Return the quantization_config of a folder of `awq`."""
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None, **more,
    }  # fmt: skip
