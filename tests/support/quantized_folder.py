"""Folders of a tiny Llama with quantized weights, written by the formats' definitions, and their dequantized twins."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
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


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 3}
ROUTER = "block_sparse_moe.gate"
EXPERT_LINEARS = {
    name: shape for name, shape in LAYER_LINEARS.items() if not name.startswith("mlp.")
} | {
    f"block_sparse_moe.experts.{expert}.{name}": (WIDTH, INNER) if name == "w2" else (INNER, WIDTH)
    for expert in range(3)
    for name in ("w1", "w2", "w3")
}  # fmt: skip


class Module(NamedTuple):
    """Tensors of a quantized module by the ends of their names, and the values that they stand for, float32."""

    tensors: dict[str, Tensor]
    values: Tensor


Quantize = Callable[[np.random.Generator, int, int], Module]  # tensors of a module of some outputs and inputs


class Pair(NamedTuple):
    """A quantized folder and its twin of floats; `values` are those of quantized modules, float32."""

    folder: Path
    twin: Path
    values: dict[str, Tensor]


def linears(*, has_experts: bool = False) -> Iterator[tuple[str, int, int]]:
    """Yield the name, outputs and inputs of every linear layer but the head and routers."""
    for layer in range(LAYERS):
        for name, shape in (EXPERT_LINEARS if has_experts else LAYER_LINEARS).items():
            yield f"model.layers.{layer}.{name}", *shape


def write_pair(
    parent: Path,
    quantize: Mapping[str, Quantize] | Quantize,
    quantization_config: object,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_quantized_head: bool = False,
    has_experts: bool = False,
) -> Pair:
    """Write both folders. `quantize`: of all modules, or by the last part of their names; others stay dense.

    With experts it is a Mixtral.
    """
    rng = np.random.default_rng(0)
    config = {**CONFIG, **(MIXTRAL if has_experts else {}), "torch_dtype": str(dtype).removeprefix("torch.")}
    floats = {name: tensor.to(dtype) for name, tensor in _kept(rng).items()}
    stored, twin, values = dict(floats), dict(floats), dict[str, Tensor]()
    for layer in range(LAYERS if has_experts else 0):
        name = f"model.layers.{layer}.{ROUTER}.weight"
        stored[name] = twin[name] = _matrix(rng, 3, WIDTH, dtype)
    modules = [*linears(has_experts=has_experts), *([("lm_head", VOCAB + 5, WIDTH)] if has_quantized_head else [])]
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


def change_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change a tensor of a folder, or with None remove it."""
    tensors = load_file(folder / "model.safetensors")
    found = tensors.pop(name)
    if change is not None:
        tensors[name] = change(found).contiguous()
    save_file(tensors, folder / "model.safetensors")


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
    if 32 % bits:
        return packed(np.packbits(bits_of(elements, bits), axis=-1, bitorder="little"), 8)
    per_word = 32 // bits
    elements = np.pad(elements, ((0, 0), (0, -elements.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((len(elements), elements.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        words |= elements[:, place::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def bits_of(elements: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Return the bits of elements, the lowest first, as uint8 [num_rows, width * bits]."""
    return (elements[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(elements), -1)


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


def compressed(
    bits: int,
    group_size: int = -1,
    *,
    storage: str = "pack-quantized",
    symmetric: bool = True,
    is_ordered: bool = False,
    strategy: str | None = None,
) -> Quantize:
    """Return the quantizer of compressed-tensors' integer formats; their elements are signed.

    strategy: "tensor" has one scale for all.
    """
    half = 1 << (bits - 1)

    def quantize(rng: np.random.Generator, num_rows: int, width: int) -> Module:
        found = random_integers(
            rng, num_rows, width, bits, group_size, is_symmetric=symmetric, is_ordered=is_ordered,
            scale_dtype=torch.bfloat16,
        )  # fmt: skip
        values, scales = found.values, found.scales
        if strategy == "tensor":
            scales = scales[:1, 0]
            values = scales.float() * torch.from_numpy((found.elements - half).astype(np.float32))
        tensors = {"weight_scale": scales}
        if storage == "pack-quantized":
            tensors |= {"weight_packed": packed(found.elements, bits), "weight_shape": torch.tensor([num_rows, width])}
            zeros = packed(found.zeros.T, bits).T
        else:
            tensors["weight"] = torch.from_numpy((found.elements - half).astype(np.int8))
            zeros = torch.from_numpy((found.zeros - half).astype(np.int8))
        if not symmetric:
            tensors["weight_zero_point"] = zeros
        if is_ordered:
            tensors["weight_g_idx"] = torch.from_numpy(found.group_of.astype(np.int32))
        return Module(tensors, values)

    return quantize


def float_codes(storage: str) -> Quantize:
    """Return the quantizer of one of compressed-tensors' formats of floats in groups."""
    bits, group_size, mantissa = {
        "nvfp4-pack-quantized": (4, 16, 1), "mxfp4-pack-quantized": (4, 32, 1), "mxfp6-pack-quantized": (6, 32, 3),
        "mxfp8-quantized": (8, 32, 3),
    }[storage]  # fmt: skip

    def quantize(rng: np.random.Generator, num_rows: int, width: int) -> Module:
        codes = rng.integers(0, 1 << bits, (num_rows, width))
        groups = (num_rows, -(-width // group_size))
        if bits == 8:
            codes = np.where(codes & 0x7F == 0x7F, 0, codes)  # NaN
            numbers = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
            tensors, numbers = {"weight": numbers}, numbers.float()
        else:
            octets = np.packbits(bits_of(codes, bits), axis=-1, bitorder="little")
            tensors, numbers = {"weight_packed": torch.from_numpy(octets)}, small_floats(codes, bits, mantissa)
        if storage == "nvfp4-pack-quantized":
            stored = torch.from_numpy(rng.random(groups) * 400 + 1).to(torch.float8_e4m3fn)
            scale_of_all = torch.tensor([3000.0])
            tensors["weight_global_scale"] = scale_of_all
            scales = stored.float() / scale_of_all
        else:
            stored = torch.from_numpy(rng.integers(118, 124, groups).astype(np.uint8))
            scales = 2.0 ** (stored.float() - 127)
        tensors["weight_scale"] = stored
        return Module(tensors, scales.repeat_interleave(group_size, dim=1)[:, :width] * numbers)

    return quantize


def small_floats(codes: NDArray[np.integer], bits: int, mantissa: int) -> Tensor:
    """Return the numbers of codes with a sign, an exponent (bias 1) and so many bits of a mantissa."""
    sign, exponent = codes >> (bits - 1), codes >> mantissa & (1 << (bits - 1 - mantissa)) - 1
    fraction = (codes & (1 << mantissa) - 1) / (1 << mantissa)
    sizes = np.where(exponent == 0, fraction, (1 + fraction) * 2.0 ** (exponent - 1))
    return torch.from_numpy(np.where(sign == 1, -sizes, sizes).astype(np.float32))


def compressed_config(
    bits: int,
    group_size: int = -1,
    *,
    storage: str = "pack-quantized",
    symmetric: bool = True,
    is_ordered: bool = False,
    strategy: str | None = None,
    **more: object,
) -> dict[str, object]:
    """Return the quantization_config of a folder of `compressed`; `more` are options of its group."""
    kind = "channel" if group_size == -1 else "group"
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy or kind, "dynamic": False,
        "group_size": None if strategy or group_size == -1 else group_size, "observer": "minmax",
        "actorder": "group" if is_ordered else None, "block_structure": None, "observer_kwargs": {},
    }  # fmt: skip
    return compressed_groups(weights, storage, **more)


def compressed_groups(weights: object, storage: str, **more: object) -> dict[str, object]:
    """Return a quantization_config of one group of all linear layers but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **more}
    return {
        "quant_method": "compressed-tensors", "format": storage, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
        "global_compression_ratio": None, "sparsity_config": {}, "transform_config": {}, "version": "0.20.0",
    }  # fmt: skip


TOKEN_INT8 = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None,
}  # fmt: skip


def e4m3(rng: np.random.Generator, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return random e4m3 elements of all sizes but NaN, and their values, float32: sign, 4 bits, bias 7, 3 bits."""
    bits = rng.integers(0, 127, (num_rows, width)) + 128 * rng.integers(0, 2, (num_rows, width))
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    signed = np.where(bits >= 128, -values, values).astype(np.float32)
    return torch.from_numpy(bits.astype(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(signed)


def fp8(
    block: tuple[int, int] | None = None, *, kind: str = "channel", name: str = "weight_scale",
    scale_dtype: torch.dtype = torch.float32,
) -> Quantize:  # fmt: skip
    """Return the quantizer of e4m3 weights with scales per block of outputs and inputs, per channel, or one ("tensor").

    "scalar" and "flat" are other shapes of one scale and of one per channel.
    """

    def quantize(rng: np.random.Generator, num_rows: int, width: int) -> Module:
        elements, values = e4m3(rng, num_rows, width)
        rows, inputs = block or (num_rows if kind in ("tensor", "scalar") else 1, width)
        shape = -(-num_rows // rows), -(-width // inputs)
        scales = torch.from_numpy((rng.random(shape) + 0.5) * width**-0.5 / 100).to(scale_dtype)
        whole = scales.float()[torch.arange(num_rows) // rows][:, torch.arange(width) // inputs]
        shapes = {"scalar": (), "tensor": (1,), "flat": (num_rows,)}
        stored = scales.reshape(shapes[kind]) if block is None and kind in shapes else scales
        return Module({"weight": elements, name: stored}, whole * values)

    return quantize


def fp8_config(block: tuple[int, int] | None = None, **more: object) -> dict[str, object]:
    """Return the quantization_config of a folder of `fp8`, as Hugging Face writes it."""
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": None if block is None else list(block), **more,
    }  # fmt: skip
