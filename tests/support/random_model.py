"""A tiny Llama with random weights and awkward sizes: nothing in it fills a register, a tile or a partition evenly."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 301
MAX_MODEL_LEN = 640  # two borders between partitions of 256 tokens, and more
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE, _LAYERS = 72, 6, 2, 24, 100, 2


def write_random_model(folder: Path, **changes: object) -> Path:
    """Write config, with `changes`, and weights into `folder`; return it. No tokenizer: prompts are token ids."""
    generator = torch.Generator().manual_seed(0)

    def weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
        return torch.randn(num_outputs, num_inputs, generator=generator) * 1.5 / num_inputs**0.5

    tensors = {"model.embed_tokens.weight": weight(VOCAB_SIZE, _WIDTH), "lm_head.weight": weight(VOCAB_SIZE, _WIDTH)}
    tensors["model.norm.weight"] = torch.rand(_WIDTH, generator=generator) + 0.5
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
            "mlp.gate_proj": (_INTERMEDIATE, _WIDTH),
            "mlp.up_proj": (_INTERMEDIATE, _WIDTH),
            "mlp.down_proj": (_WIDTH, _INTERMEDIATE),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.rand(_WIDTH, generator=generator) + 0.5
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _WIDTH,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
