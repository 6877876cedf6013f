"""A small Llama folder written by hand, and the fixtures of tests that run a decoder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from support.paged_runner import back_end, one_thread, paged_runner

__all__ = ["back_end", "one_thread", "paged_runner"]

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def llama_tensors(config: dict[str, object]) -> dict[str, Tensor]:
    """Random tensors of a Llama without biases, untied, with Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    vocab, width, inner = (int(str(config[key])) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    kv_width = width * int(str(config["num_key_value_heads"])) // int(str(config["num_attention_heads"]))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
    }
    for layer in range(int(str(config["num_hidden_layers"]))):
        stem = f"model.layers.{layer}."
        shapes |= {f"{stem}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{stem}self_attn.{name}.weight": (width, width) for name in ("q_proj", "o_proj")}
        shapes |= {f"{stem}self_attn.{name}.weight": (kv_width, width) for name in ("k_proj", "v_proj")}
        shapes |= {f"{stem}mlp.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{stem}mlp.down_proj.weight": (width, inner)}
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


@pytest.fixture
def write_llama(tmp_path: Path) -> Callable[..., Path]:
    """Write a model folder: a config with changes, and tensors with changes (None drops one); return the folder."""

    def write(config: dict[str, object] | None = None, tensors: dict[str, Tensor | None] | None = None) -> Path:
        changed = {**llama_tensors(LLAMA_CONFIG), **(tensors or {})}
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **(config or {})}))
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    return write
