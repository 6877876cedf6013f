"""Quality of quantized models: divergence from the float model, and what outlier channels do to int8 activations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quire.core.arrays import dtype_name
from quire.kernels.choice import choose_back_end
from quire.kernels.quantized import expand, round_to_nearest
from quire.model.config import read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import build_decoder
from quire.model.quantization import (
    ONLINE_METHODS,
    OnlineMethod,
    Quantization,
    QuantizationOptions,
    WeightScheme,
    resolve,
)
from quire.model.weight_format import RoundedFormat
from quire.text.tokenizer import Tokenizer
from support.memory_checkpoint import MemoryCheckpoint
from support.on_tensors import run
from support.outliers import add_outliers

LENGTH = 256
UNSEEN_TEXT = Path(__file__).parents[1] / "data/unseen_text.txt"  # the same whatever the sources say
BARS = {"int8": 0.002, "int4": 0.05}  # nats per token


@pytest.fixture(scope="module")
def tokens(demo_model: Path) -> Tensor:
    """Tokens of a text that the model was not trained on."""
    tokenizer = Tokenizer.from_folder(demo_model)
    return torch.tensor(tokenizer.encode(UNSEEN_TEXT.read_text(encoding="utf-8"))[:LENGTH])


def load(folder: Path, tensors: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype) -> Decoder:
    device = torch.device("cpu")
    return build_decoder(
        spec_from_config(read_config(folder)), MemoryCheckpoint(tensors), dtype=dtype_name(dtype), device=device,
        back_end=choose_back_end(device), weight_format=None if quantization is None else RoundedFormat(quantization),
    )  # fmt: skip


def log_probs(model: Decoder, tokens: Tensor) -> Tensor:
    num_blocks, places = -(-len(tokens) // 16), torch.arange(len(tokens))
    cache = KVCache.allocate(model.kv_geometry, num_blocks, 16, model.back_end)
    starts, lens = torch.tensor([0, len(tokens)]).int(), torch.tensor([len(tokens)]).int()
    batch = ForwardBatch(tokens, places, places, starts, lens, torch.arange(num_blocks).int()[None])
    with torch.inference_mode():
        return run(model, batch, cache).double().log_softmax(dim=-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    """Return the mean KL divergence, nats per token."""
    return (expected.exp() * (expected - found)).sum(dim=-1).mean().item()


class RoundedLinear(nn.Module):
    """A layer in float64, of a weight rounded as by `round_to_nearest` and inputs rounded in groups to int8."""

    def __init__(self, weight: Tensor, weight_format: str, group_size: int, activation_group_size: int) -> None:
        super().__init__()
        found = round_to_nearest(weight.float(), weight_format, group_size)
        self._weight, self._group_size = expand(replace(found, dtype=torch.float32)).double(), activation_group_size

    def forward(self, x: Tensor) -> Tensor:
        rounded = []
        for group in x.split(self._group_size, dim=-1):
            scale = group.abs().amax(dim=-1, keepdim=True) / 127
            rounded.append((group / scale).round() * scale)
        return torch.cat(rounded, dim=-1) @ self._weight.T


def reference_log_probs(folder: Path, tokens: Tensor, quantization: Quantization | None) -> Tensor:
    """The model by transformers in float64, with the rounding of the quantization and none other."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if quantization is not None:
        head = RoundedLinear(model.lm_head.weight.detach(), *_sizes(quantization.head))
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, RoundedLinear(linear.weight.detach(), *_sizes(quantization.layers)))
        model.lm_head = head
    with torch.inference_mode():
        return model(tokens[None]).logits[0].log_softmax(dim=-1)  # type: ignore[no-any-return]


def _sizes(scheme: WeightScheme) -> tuple[str, int, int]:
    return scheme.format, scheme.group_size, scheme.activation_group_size


@pytest.mark.parametrize("method", ONLINE_METHODS)
def test_divergence_is_that_of_the_rounding_alone(demo_model: Path, tokens: Tensor, method: OnlineMethod) -> None:
    """The reference computes in float64, so what the engine's own arithmetic adds is in the difference."""
    tensors = load_file(demo_model / "model.safetensors")
    quantization = resolve(QuantizationOptions(method), "config.json")
    plain, found = (log_probs(load(demo_model, tensors, each, torch.float32), tokens) for each in (None, quantization))
    expected = [reference_log_probs(demo_model, tokens, each) for each in (None, quantization)]
    assert divergence(expected[0], plain) < 1e-6
    assert divergence(plain, found) <= 1.05 * divergence(*expected)
    assert divergence(*expected) <= 1.05 * divergence(plain, found)
    assert divergence(plain, found) < BARS[method]


def test_outlier_channels_at_most_double_the_error_of_int4_weights(demo_model: Path, tokens: Tensor) -> None:
    """A channel a hundred times as large takes the finer steps of int8 activations from the others of its group."""
    tensors = load_file(demo_model / "model.safetensors")
    plain = log_probs(load(demo_model, tensors, None, torch.float32), tokens)
    add_outliers(tensors, 100.0)
    assert divergence(plain, log_probs(load(demo_model, tensors, None, torch.float32), tokens)) < 1e-6
    errors = {}
    for activations in ("int8", "bfloat16"):
        quantization = resolve(QuantizationOptions("int4", activations=activations), "config.json")
        found = log_probs(load(demo_model, tensors, quantization, torch.float32), tokens)
        errors[activations] = (found - plain).square().mean().sqrt().item()
    assert errors["bfloat16"] < errors["int8"] <= 2 * errors["bfloat16"]
