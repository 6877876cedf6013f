"""Layer programs of decoders: layers that differ, parts, gather hooks and the side table."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.kernels.linear import Linear
from quire.kernels.program import Activations, LayerInputs
from quire.model.batch import ForwardBatch
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.config import read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.ranks import Ranks
from quire.model.sharding import Cut, Shard
from quire.model.spec import LayerSpec, Part, SpecError
from quire.model.weights import WeightReader

TOKENS = torch.randint(96, (20,), generator=torch.Generator().manual_seed(2)).tolist()


def load(
    folder: Path, back_end: BackEnd, change: Callable[[LayerSpec, int], LayerSpec], ranks: Ranks | None = None
) -> Decoder:
    """Load a Llama whose layers have been changed, one by one."""
    spec = spec_from_config(read_config(folder), "config.json")
    spec = replace(spec, layers=tuple(change(layer, index) for index, layer in enumerate(spec.layers)))
    weights = WeightReader(SafetensorsCheckpoint(folder), spec.weights, back_end, torch.float32, torch.device("cpu"))
    return Decoder(spec, weights, 64, 64, ranks)


@dataclass(frozen=True)
class Shift:
    """x plus a value per sequence, from the side table."""

    name: str
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        counts = inputs.metadata.query_starts.diff()
        activations["x"] = activations["x"] + inputs.side["shift"].repeat_interleave(counts)[:, None]


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


def test_op_reads_the_side_table_of_the_batch(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    part = Part("shift", "attention_out", lambda reader, name: Shift(name))
    folder = write_llama()
    decoder = load(folder, back_end, lambda layer, index: replace(layer, parts=(part,)))

    def run(*shifts: float) -> Tensor:
        int32 = torch.tensor([0, 3, 5], dtype=torch.int32)
        batch = ForwardBatch(
            torch.tensor(TOKENS[:5]), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 2, 8, 9]), int32,
            int32.diff(), torch.tensor([[0], [1]], dtype=torch.int32), side={"shift": torch.tensor(shifts)},
        )  # fmt: skip
        return decoder.forward(batch, paged_runner(decoder).cache)

    plain, one, both = run(0.0, 0.0), run(0.0, 0.5), run(0.5, 0.5)
    assert torch.equal(plain[:3], one[:3])
    assert torch.equal(one[3:], both[3:])
    assert not torch.allclose(plain[3:], one[3:])
    on_cuda = replace(back_end, name="cuda")
    with pytest.raises(ConfigError, match="device cuda does not support Shift yet"):
        load(folder, on_cuda, lambda layer, index: replace(layer, parts=(part,)))
