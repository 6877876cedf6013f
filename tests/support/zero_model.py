"""Folders with a tiny model of each family, all weights zero: for what depends on sizes alone."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.model.config import spec_from_config
from quire.model.shapes import DecoderShapes, LinearShape, NormShape, TableShape, layer_shapes
from quire.model.spec import DecoderSpec

LLAMA: dict[str, object] = {
    "vocab_size": 301, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 64,
}  # fmt: skip
OPT: dict[str, object] = {
    "vocab_size": 99, "hidden_size": 48, "ffn_dim": 70, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
GPT2: dict[str, object] = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 2, "n_positions": 32}
FAMILIES = {
    "Llama": LLAMA,
    "Mistral": LLAMA,
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"tie_word_embeddings": True},
    "OPT": OPT,
    "OPT, narrow embeddings": OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
    "GPT2": GPT2,
    "GPTNeoX": LLAMA | {"head_dim": None, "num_attention_heads": 3},
    "Olmo": LLAMA | {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
    "Mixtral": LLAMA | {"num_local_experts": 3},
    "Qwen2Moe": LLAMA | {"num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 70},
}


def config_of(name: str, **changes: object) -> dict[str, object]:
    family = name.partition(",")[0]
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return FAMILIES[name] | {"architectures": [family + suffix]} | changes


def spec_of(name: str, **changes: object) -> DecoderSpec:
    return spec_from_config(config_of(name, **changes))


def write_zero_model(folder: Path, name: str, dtype: str, **changes: object) -> Path:
    """Write config.json, and zeros for every shape."""
    config = config_of(name, dtype=dtype, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    _write_weights(folder, spec_from_config(config), getattr(torch, dtype))
    return folder


def _write_weights(folder: Path, spec: DecoderSpec, dtype: torch.dtype) -> None:
    tensors: dict[str, torch.Tensor] = {}
    shapes, prefix = DecoderShapes.of(spec), spec.weights.prefixes[0]
    placed = [("", shape) for shape in shapes] + [
        (spec.weights.layer.format(layer=i), shape)
        for i, layer in enumerate(spec.layers)
        for shape in layer_shapes(spec, layer)
    ]
    for scope, shape in placed:
        if shape is None:
            continue
        start = prefix + scope
        if isinstance(shape, TableShape):
            tensors[f"{start}{shape.module}.weight"] = torch.zeros(shape.num_rows, shape.width, dtype=dtype)
        elif isinstance(shape, NormShape):
            tensors |= {start + name: torch.zeros(size, dtype=dtype) for name, size in shape.tensors.items()}
        elif shape is not shapes.head or not spec.is_head_tied:
            tensors |= _linear_tensors("" if shape is shapes.head else start, shape, spec, dtype)
    save_file(tensors, folder / "model.safetensors")


def _linear_tensors(start: str, shape: LinearShape, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    for module, rows in ((module, sum(counts)) for module, counts in shape.module_rows):
        size = (shape.width, rows) if spec.weights.is_transposed else (rows, shape.width)
        tensors[f"{start}{module}.weight"] = torch.zeros(size, dtype=dtype)
        if shape.has_bias:
            tensors[f"{start}{module}.bias"] = torch.zeros(rows, dtype=dtype)
    return tensors
