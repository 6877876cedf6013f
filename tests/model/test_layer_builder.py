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
from quire.kernels.tensors import added, like
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.config import read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.sharding import Cut, Ranks, Shard
from quire.model.spec import LayerSpec, Part, SpecError
from quire.model.weights import WeightReader

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
        return replace(layer, norm_position=positions[index], window=None if index else 7, attention_scale=0.2 + index)

    folder = write_llama()
    found = paged_runner(load(folder, back_end, change)).run("a", TOKENS, [13])
    single_ops = replace(back_end, fuse=lambda program: program)
    assert torch.equal(found, paged_runner(load(folder, single_ops, change)).run("a", TOKENS, [13]))
    alike = paged_runner(load(folder, back_end, lambda layer, index: layer)).run("a", TOKENS, [13])
    assert not torch.allclose(found, alike, atol=0.1)


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
