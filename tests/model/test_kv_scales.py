"""Scales of an fp8 KV cache in a checkpoint: read, checked, and used by every layer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache import ONES, KVScales
from quire.kernels.program import AttentionOp, RotaryWriteOp
from quire.kernels.reference.back_ends import TORCH
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from support.random_folder import write_random_folder
from support.random_model import write_random_model

SCALES = {"layers.0.self_attn.k_scale": 0.5, "layers.0.self_attn.v_scale": 0.25, "layers.1.self_attn.v_scale": 3.0}

LATENT: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path)


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    whole = load_file(folder / "model.safetensors") | {f"model.{name}": x for name, x in tensors.items()}
    save_file(whole, folder / "model.safetensors")


def scales_of(decoder: Decoder) -> list[KVScales]:
    ops = decoder._programs[0].ops
    return [op.spec.kv_scales for op in ops if isinstance(op, AttentionOp | RotaryWriteOp)]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_calibrated_scales_are_read_with_fp8_alone(folder: Path, shape: tuple[int, ...]) -> None:
    add(folder, {name: torch.full(shape, scale, dtype=torch.bfloat16) for name, scale in SCALES.items()})
    found = scales_of(load_model(folder, back_end=TORCH, kv_cache_dtype="fp8"))
    assert found == [KVScales(0.5, 0.25)] * 2 + [KVScales(1.0, 3.0)] * 2
    for other in ("auto", "fp8_per_token_head", "int8_per_token_head"):
        assert scales_of(load_model(folder, back_end=TORCH, kv_cache_dtype=other)) == [ONES] * 4


def test_scale_of_keys_is_that_of_latents(tmp_path: Path) -> None:
    """A value is a part of its key, and has no scale of its own."""
    folder = write_random_folder(tmp_path, LATENT)
    add(folder, {name: torch.tensor(scale) for name, scale in SCALES.items()})
    found = scales_of(load_model(folder, back_end=TORCH, kv_cache_dtype="fp8"))
    assert found == [KVScales(0.5, 0.5)] * 2 + [ONES] * 2


def test_checkpoint_without_scales_has_ones(folder: Path) -> None:
    assert scales_of(load_model(folder, back_end=TORCH, kv_cache_dtype="fp8")) == [ONES] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_with_scales_stay_near_those_without(
    folder: Path, dtype: str, back_end: BackEnd, paged_runner: type
) -> None:
    tokens = torch.randint(300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for kv_cache_dtype in ("auto", "fp8", "fp8"):
        decoder = load_model(folder, dtype=dtype, back_end=back_end, kv_cache_dtype=kv_cache_dtype)
        logits.append(paged_runner(decoder).step({"a": tokens})["a"])
        if kv_cache_dtype == "fp8":
            add(folder, {name: torch.tensor(scale) for name, scale in SCALES.items()})
    plain, ones, scaled = logits
    assert not torch.equal(ones, scaled)
    for other in (ones, scaled):
        assert (other - plain).square().mean().sqrt() < 0.1 * plain.square().mean().sqrt()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (torch.tensor([1.0, 2.0]), r"k_scale has shape \[2\], expected one number"),
        (torch.tensor(0.0), "k_scale is 0.0, expected 1e-20 to"),
        (torch.tensor(-1.0), "k_scale is -1.0, expected"),
        (torch.tensor(torch.nan), "k_scale has values that are NaN"),
        (torch.tensor(1), "k_scale has dtype I64"),
    ],
)
def test_scale_that_is_none_is_named(folder: Path, bad: Tensor, named: str) -> None:
    add(folder, {"layers.1.self_attn.k_scale": bad})
    with pytest.raises(ModelError, match=f"model.safetensors: tensor model.layers.1.self_attn.{named}"):
        load_model(folder, back_end=TORCH, kv_cache_dtype="fp8")
