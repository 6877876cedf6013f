"""Model folders of any family with random weights: tensors of the shapes and names that its spec asks for."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.model.config import spec_from_config
from quire.model.config_reader import ConfigReader
from quire.model.eagle_config import eagle_spec
from quire.model.shapes import (
    DecoderShapes,
    LinearShape,
    NormShape,
    Shape,
    VectorShape,
    layer_shapes,
    shapes_around,
)

# A model with experts, a shared one among them.
MIXTURE: dict[str, object] = {
    "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 320, "hidden_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
    "intermediate_size": 112, "moe_intermediate_size": 80, "shared_expert_intermediate_size": 112,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
# One with a gated delta net, of 6 value heads over 3 key heads.
HYBRID: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 320, "hidden_size": 96,
    "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "full_attention_interval": 2, "max_position_embeddings": 128,
}  # fmt: skip
# One with attention and a Mamba-2 of 6 heads side by side.
PARALLEL_HYBRID: dict[str, object] = {
    "architectures": ["FalconH1ForCausalLM"], "vocab_size": 320, "hidden_size": 96, "intermediate_size": 112,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "mamba_d_ssm": 96,
    "mamba_n_heads": 6, "mamba_d_state": 32, "max_position_embeddings": 128,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "ssm_out_multiplier": 0.5,
}  # fmt: skip
NORMED_HYBRID = PARALLEL_HYBRID | {"mamba_rms_norm": True}  # the heads are one group


def write_random_folder(folder: Path, config: dict[str, object], dtype: torch.dtype = torch.float32) -> Path:
    """Write config.json and model.safetensors; return the folder. A tied model has no head."""
    spec, tensors_of = spec_from_config(config), RandomTensors()
    names = spec.weights
    *around, head = DecoderShapes.of(spec)
    tensors = {} if spec.is_head_tied else tensors_of(head, "")
    for shape in around:
        tensors |= tensors_of(shape, names.prefixes[0])
    for index, layer in enumerate(spec.layers):
        for shape in layer_shapes(spec, layer):
            prefix = names.prefixes[0] + names.layer.format(layer=index)
            tensors |= tensors_of(shape, prefix, is_transposed=names.is_transposed)
    if spec.mtp is not None:
        names = spec.mtp.weights
        for shape in shapes_around(spec.mtp):
            tensors |= tensors_of(shape, names.prefixes[0])
        for shape in layer_shapes(spec.mtp, spec.mtp.layers[0]):
            tensors |= tensors_of(shape, names.prefixes[0] + names.layer.format(layer=0))
    return write_folder(folder, config, tensors, dtype)


def write_random_head(folder: Path, config: dict[str, object], *names: str) -> Path:
    """Write the folder of an EAGLE-3 head. `names`: tensors that it has and a config does not tell of.

    A name that begins with `midlayer.` stands for the first layer's name. Heads that draft some tokens draft every
    second one, and the last.
    """
    spec, tensors_of = eagle_spec(ConfigReader(config, "head"), names), RandomTensors()
    tensors = tensors_of(DecoderShapes.of(spec).head, "")
    for shape in shapes_around(spec):
        tensors |= tensors_of(shape, "")
    for index, layer in enumerate(spec.layers):
        for shape in layer_shapes(spec, layer):
            tensors |= tensors_of(shape, spec.weights.layer.format(layer=index))
    assert spec.eagle is not None
    write_folder(folder, config, tensors)
    if spec.eagle.num_drafted < spec.vocab_size:
        ids = torch.arange(spec.eagle.num_drafted)
        targets = (2 * ids).clamp(max=spec.vocab_size - spec.eagle.num_drafted + ids)
        tensors["d2t"], tensors["t2d"] = targets - ids, torch.isin(torch.arange(spec.vocab_size), targets)
        save_file(tensors, folder / "model.safetensors")
    return folder


def write_folder(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    """Write config.json and model.safetensors; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return folder


class RandomTensors:
    """Random tensors of shapes, by name, from one seed."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5

    def __call__(self, shape: Shape | None, prefix: str, *, is_transposed: bool = False) -> dict[str, Tensor]:
        """Return the tensors of a shape."""
        random = self._random
        if shape is None:
            return {}
        if isinstance(shape, NormShape):
            made = {prefix + name: random(*size) for name, size in shape.tensors.items()}
            return {name: each * 0.3 + 1 if name.endswith(".weight") else each for name, each in made.items()}
        if isinstance(shape, VectorShape):
            return {f"{prefix}{shape.name}": random(*shape.stored)}
        if not isinstance(shape, LinearShape):
            return {f"{prefix}{shape.module}.weight": random(shape.num_rows, shape.width)}
        made = {}
        for module, rows in ((module, sum(counts)) for module, counts in shape.module_rows):
            weight = random(rows, shape.width)
            made[f"{prefix}{module}.weight"] = weight.T.contiguous() if is_transposed else weight
            made |= {f"{prefix}{module}.bias": random(rows)} if shape.has_bias else {}
        return made
