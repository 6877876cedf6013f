"""Layer programs of decoders: layers that differ, parts and gather hooks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.kernels.layers import Linear
from quire.kernels.program import Activations, LayerInputs
from quire.kernels.reference.back_ends import REFERENCE
from quire.kernels.tensors import added, like
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.config import num_parameters, read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.dummy_weights import DummyCheckpoint
from quire.model.kv_cache import LayerKV
from quire.model.sharding import Cut, Ranks, Shard
from quire.model.spec import Attention, FeedForward, LayerSpec, Part, Rotary, SpecError
from quire.model.weights import WeightReader
from support.zero_model import spec_of

TOKENS = torch.randint(96, (20,), generator=torch.Generator().manual_seed(2)).tolist()


def load(
    folder: Path, back_end: BackEnd, change: Callable[[LayerSpec, int], LayerSpec], ranks: Ranks | None = None
) -> Decoder:
    """Load a Llama whose layers have been changed, one by one."""
    spec = spec_from_config(read_config(folder), "config.json")
    spec = replace(spec, layers=tuple(change(layer, index) for index, layer in enumerate(spec.layers)))
    weights = WeightReader(SafetensorsCheckpoint(folder), spec.weights, back_end, "float32", "cpu")
    return Decoder(spec, weights, 64, 64, ranks)


@dataclass(frozen=True)
class Shift:
    """x plus its position, times a factor."""

    name: str
    factor: float = 1.0
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        shift = np.asarray(inputs.positions)[:, None].repeat(activations["x"].shape[1], axis=1) * self.factor
        activations["x"] = added(activations["x"], like(shift.astype(np.float32), activations["x"]))


@dataclass
class OnlyRank:
    """The exchanges of one rank with itself, which notes their widths."""

    shard: Shard = field(default_factory=lambda: Shard(0, 1))
    widths: list[int] = field(default_factory=list)

    def gather(self, cut: Cut) -> "Hook":
        return Hook(cut.width, cut.width, self.widths)

    def joined_head(self, head: Linear, cut: Cut) -> Linear:
        return head


@dataclass
class Hook:
    """A gather that only notes its calls."""

    num_own: int
    width: int
    widths: list[int]
    address: tuple[int, int] | None = None

    def __call__(self, own: Tensor) -> Tensor:
        self.widths.append(own.shape[1])
        return own


@pytest.mark.parametrize("positions", [("pre", "post"), ("post", "pre")])
def test_layers_may_differ(
    positions: tuple[str, str], write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    def change(layer: LayerSpec, index: int) -> LayerSpec:
        layer = layer.with_attention(window=None if index else 7, attention_scale=0.2 + index)
        return replace(layer, norm_position=positions[index])

    folder = write_llama()
    found = paged_runner(load(folder, back_end, change)).run("a", TOKENS, [13])
    single_ops = replace(back_end, fuse=lambda program: program)
    assert torch.equal(found, paged_runner(load(folder, single_ops, change)).run("a", TOKENS, [13]))
    alike = paged_runner(load(folder, back_end, lambda layer, index: layer)).run("a", TOKENS, [13])
    assert not torch.allclose(found, alike, atol=0.1)


MIXED = replace(spec_of("Llama"), rotary=Rotary(8, 10_000.0, 64), layers=(
    LayerSpec(Attention(4, 2, 16), FeedForward(24, "silu_and_mul")),
    LayerSpec(None, FeedForward(40, "silu_and_mul")),
    LayerSpec(Attention(6, 1, 8, window=5), None),
    LayerSpec(Attention(2, 2, 32, has_rotary=False), FeedForward(24, "silu_and_mul")),
))  # fmt: skip


def test_heads_may_differ_by_layer_and_a_sublayer_may_be_missing(back_end: BackEnd, paged_runner: Callable) -> None:
    model = load_mixed(back_end)
    assert model.kv_geometry.layers == (
        LayerKV(2, 16, "float32"), LayerKV(1, 8, "float32", window=5), LayerKV(2, 32, "float32")
    )  # fmt: skip
    found = paged_runner(model).run("a", TOKENS, [13])
    single_ops = replace(back_end, fuse=lambda program: program)
    assert torch.equal(found, paged_runner(load_mixed(single_ops)).run("a", TOKENS, [13]))
    chunks = paged_runner(load_mixed(back_end)).run("a", TOKENS, [3, 9, 17])
    torch.testing.assert_close(chunks, found, rtol=0, atol=0 if back_end.is_exact else 1e-5)
    expected = paged_runner(load_mixed(REFERENCE)).run("a", TOKENS, [13])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert model.num_parameters == num_parameters(MIXED)


def load_mixed(back_end: BackEnd) -> Decoder:
    weights = WeightReader(DummyCheckpoint(MIXED), MIXED.weights, back_end, "float32", "cpu")
    return Decoder(MIXED, weights, 64, 64)


def test_layers_of_one_sublayer_have_no_norm_after_both() -> None:
    with pytest.raises(SpecError, match="layers of one sublayer with post norms are not supported"):
        LayerSpec(None, FeedForward(24, "silu_and_mul"), norm_position="post")


def test_part_without_a_place_is_refused(write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    part = Part("shift", "down", lambda reader, name: Shift(name))
    with pytest.raises(SpecError, match="layer part shift: a layer has no op 'down' to follow"):
        load(write_llama(), back_end, lambda layer, index: replace(layer, parts=(part,)))


def test_gather_follows_each_op_that_ranks_divide(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    folder, ranks = write_llama(), OnlyRank()
    found = paged_runner(load(folder, back_end, lambda layer, index: layer, ranks)).step({"a": TOKENS})["a"]
    assert ranks.widths == 2 * [32, 32, 56, 32]  # attention, attention_out, feed_forward_in, feed_forward_out
    alone = paged_runner(load(folder, back_end, lambda layer, index: layer)).step({"a": TOKENS})["a"]
    assert torch.equal(found, alone)


def test_op_of_a_part_runs_in_its_place_and_is_refused_on_other_devices(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    folder = write_llama()

    def run(back_end: BackEnd, factor: float) -> Tensor:
        part = Part("shift", "attention_out", lambda reader, name: Shift(name, factor))
        decoder = load(folder, back_end, lambda layer, index: replace(layer, parts=(part,)))
        return paged_runner(decoder).run("a", TOKENS, [13])

    plain = paged_runner(load(folder, back_end, lambda layer, index: layer)).run("a", TOKENS, [13])
    assert torch.equal(run(back_end, 0.0), plain)
    shifted = run(back_end, 0.5)
    assert torch.equal(shifted[:1], plain[:1])
    assert not torch.allclose(shifted[1:], plain[1:])
    with pytest.raises(ConfigError, match="device cuda does not support Shift yet"):
        run(replace(back_end, name="cuda"), 0.5)
