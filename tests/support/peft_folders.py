"""PEFT folders of LoRA adapters with random factors, for models of `transformers` names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    seed: int = 0,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 8,
    ranks: Mapping[str, int] | None = None,
    size: float = 1.0,
    **changes: object,
) -> Path:
    """Write an adapter of every layer of a model; return its folder. `ranks`: rank_pattern, by ends of names.

    `size` multiplies B, and `changes` are of its configuration.
    """
    generator, ranks = torch.Generator().manual_seed(seed), ranks or {}
    tensors = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            is_read = not module.startswith("mtp.") and ".experts." not in module   # as modules of peft's model
            if module.rpartition(".")[2] not in targets or not is_read:
                continue
            out_features, in_features = file.get_slice(name).get_shape()
            own = next((each for end, each in ranks.items() if module.endswith(f".{end}")), rank)
            stem = f"base_model.model.{module}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(own, in_features, generator=generator) / in_features**0.5
            tensors[f"{stem}B.weight"] = size * torch.randn(out_features, own, generator=generator) / own**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": list(targets),
        "rank_pattern": dict(ranks), "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder
