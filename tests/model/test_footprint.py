"""What a model takes, counted from its config, is what the loaded one takes, for every family."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.core.errors import ConfigError
from quire.kernels.back_end import choose_back_end
from quire.model.checkpoint import Checkpoint
from quire.model.config import spec_from_config
from quire.model.decoder import Decoder
from quire.model.footprint import CPU_PACKING, kv_bytes_per_token, kv_heads_per_rank, num_parameters, weight_bytes
from quire.model.shapes import DecoderShapes, LinearShape, NormShape, TableShape
from quire.model.spec import DecoderSpec
from quire.model.weights import WeightReader

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
}


def spec_of(name: str, **changes: object) -> DecoderSpec:
    family = name.partition(",")[0]
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return spec_from_config(FAMILIES[name] | {"architectures": [family + suffix]} | changes)


def write_weights(folder: Path, spec: DecoderSpec, dtype: torch.dtype) -> Checkpoint:
    """Write zeros for every shape of a spec."""
    tensors: dict[str, torch.Tensor] = {}
    shapes, prefix = DecoderShapes.of(spec), spec.weights.prefixes[0]
    placed = [("", shape) for shape in shapes] + [
        (spec.weights.layer.format(layer=i), shape) for i in range(spec.num_layers) for shape in shapes.layer
    ]
    for scope, shape in placed:
        start = prefix + scope
        if isinstance(shape, TableShape):
            tensors[f"{start}{shape.module}.weight"] = torch.zeros(shape.num_rows, shape.width, dtype=dtype)
        elif isinstance(shape, NormShape):
            for kind in ("weight", "bias") if shape.has_bias else ("weight",):
                tensors[f"{start}{shape.module}.{kind}"] = torch.zeros(shape.width, dtype=dtype)
        elif shape is not shapes.head or not spec.is_head_tied:
            tensors |= linear_tensors("" if shape is shapes.head else start, shape, spec, dtype)
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder)


def linear_tensors(start: str, shape: LinearShape, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    num_rows = shape.num_rows if len(shape.modules) > 1 else (sum(shape.num_rows),)
    tensors = {}
    for module, rows in zip(shape.modules, num_rows, strict=True):
        size = (shape.width, rows) if spec.weights.is_transposed else (rows, shape.width)
        tensors[f"{start}{module}.weight"] = torch.zeros(size, dtype=dtype)
        if shape.has_bias:
            tensors[f"{start}{module}.bias"] = torch.zeros(rows, dtype=dtype)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_count_is_the_loaded_models(tmp_path: Path, name: str, dtype: str) -> None:
    spec, torch_dtype = spec_of(name), getattr(torch, dtype)
    back_end = choose_back_end(torch.device("cpu"), head_dim=spec.head_dim)
    if back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    checkpoint = write_weights(tmp_path, spec, torch_dtype)
    reader = WeightReader(checkpoint, spec.weights, back_end, torch_dtype, torch.device("cpu"))
    decoder = Decoder(spec, reader, max_positions=spec.max_position_embeddings)
    assert num_parameters(spec) == decoder.num_parameters
    assert weight_bytes(spec, dtype, CPU_PACKING) == decoder.weight_bytes


def test_ranks_hold_a_part_each_and_norms_whole() -> None:
    spec = spec_of("Llama", hidden_size=256, head_dim=32, num_attention_heads=8, intermediate_size=512, vocab_size=512)
    alone, of_two = weight_bytes(spec, "float32"), weight_bytes(spec, "float32", num_ranks=2)
    assert alone / 2 < of_two < alone * 0.51


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [(8, 8, 2, 4), (8, 2, 2, 1), (8, 2, 4, 1), (8, 1, 8, 1), (24, 6, 4, 2), (12, 4, 3, 2), (40, 40, 1, 40)],
)
def test_ranks_hold_the_kv_heads_that_their_queries_see(heads: int, kv_heads: int, ranks: int, expected: int) -> None:
    spec = spec_of("Llama", num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert kv_heads_per_rank(spec, ranks) == expected
    assert kv_bytes_per_token(spec, 2, ranks) == 2 * 2 * expected * 24 * 2


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide the model's 6 attention heads"):
        kv_heads_per_rank(spec_of("Llama"), 4)
