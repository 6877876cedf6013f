"""Tiny random embedders and rerankers: folders with sentence-transformers' modules, and what transformers computes.

The tokenizer ends each text with a special token, as that of Qwen3-Embedding does.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import processors

from support.random_folder import write_random_folder
from support.small_tokenizers import EOS, byte_level

MAX_LEN = 640
WIDTH = 72
NO, YES = 20, 30
_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": WIDTH,
    "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 24, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
CONFIGS = {
    "llama": _LLAMA,
    "qwen3": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}
_MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def write_embedder(
    folder: Path, family: str = "qwen3", kind: str | None = "last", *, normalizes: bool = True, **changes: object
) -> Path:
    """Write an embedder with a tokenizer; without a `kind`, a plain model. `changes`: of config.json."""
    write_random_folder(folder, CONFIGS[family] | changes)
    tokenizer = byte_level()
    end = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind is not None:
        modules = [("Transformer", ""), ("Pooling", "1_Pooling")] + [("Normalize", "2_Normalize")] * normalizes
        write_modules(folder, *modules)
        flags = {f"pooling_mode_{mode}": mode == _MODES[kind] for mode in _MODES.values()}
        write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": WIDTH, **flags})
    return folder


def write_reranker(folder: Path) -> Path:
    """Write a reranker that compares the logits of NO and YES."""
    write_embedder(folder, "qwen3", None)
    write_modules(folder, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
    write_json(folder / "1_LogitScore/config.json", {"true_token_id": YES, "false_token_id": NO})
    return folder


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Write modules.json, with the last parts of types, and folders."""
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@torch.inference_mode()
def expected_embeddings(
    folder: Path, prompts: Sequence[Sequence[int]], kind: str, *, normalizes: bool = True
) -> list[NDArray[np.float32]]:
    """Return the embeddings of token ids by transformers, each computed alone in float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        states = model(torch.tensor([list(prompt)])).last_hidden_state[0]
        vector = {"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[kind]
        found.append((torch.nn.functional.normalize(vector, dim=0) if normalizes else vector).numpy())
    return found
