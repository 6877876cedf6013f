"""A model that says one round of tokens again and again, so that a test can choose the text that comes out."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

_WIDTH = 64
_SURENESS = 0.3  # times the width: how far the next token's logit stands out, in units of temperature


def write_cycle_model(folder: Path, vocab_size: int, cycle: Sequence[int], max_model_len: int = 256) -> Path:
    """Write config and weights of a Llama beside whatever tokenizer `folder` has; return the folder.

    Attention and feed-forward add nothing, so the next token depends on the last one alone. Each token of the cycle
    stands in it once. Greedy decoding follows it from its tokens; a high temperature leaves it.
    """
    assert len(set(cycle)) == len(cycle)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(vocab_size, _WIDTH, generator=generator))
    head = torch.randn(vocab_size, _WIDTH, generator=generator) * 0.02
    for token, successor in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        head[successor] = embedding[token] * _SURENESS * _WIDTH**0.5
    layer = "model.layers.0."
    square = torch.zeros(_WIDTH, _WIDTH)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_WIDTH), "lm_head.weight": head}
    tensors |= {f"{layer}{name}.weight": torch.ones(_WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{layer}self_attn.{name}_proj.weight": square.clone() for name in "qkvo"}
    tensors |= {f"{layer}mlp.{name}_proj.weight": square.clone() for name in ("gate", "up", "down")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
