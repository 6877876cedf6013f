"""The Python interpreter: which activations stay alive, and which ops a back end refuses."""

from dataclasses import dataclass

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.paged_attention import build_metadata
from quire.kernels.program import INPUT, Activations, Add, LayerInputs, Op, Program
from quire.kernels.support import require, require_ops


@dataclass(frozen=True)
class Look:
    """Adds a column of the side table to x, and notes which activations there are."""

    name: str
    x: str
    seen: list[set[str]]

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return ("y",)

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        self.seen.append(set(activations))
        activations["y"] = activations[self.x] + inputs.side["shift"][:, None]


def inputs_with(**side: torch.Tensor) -> LayerInputs:
    starts = torch.arange(3, dtype=torch.int32)
    metadata = build_metadata(torch.zeros(2, 1, dtype=torch.int32), starts, torch.ones(2, dtype=torch.int32), 8)
    return LayerInputs(torch.zeros(2).long(), torch.tensor([-1, -1]), metadata, [], [], side)


def test_activations_are_dropped_after_their_last_reader_and_ops_read_the_side_table() -> None:
    seen: list[set[str]] = []
    ops: list[Op] = [Look("a", INPUT, seen), Add("b", "y", "y", "z"), Look("c", "z", seen)]
    result = Program(tuple(ops), "y").run(torch.ones(2, 3), inputs_with(shift=torch.tensor([1.0, 10.0])))
    assert result.tolist() == [[5.0] * 3, [32.0] * 3]
    assert seen == [{INPUT}, {"z"}]


def test_ops_without_a_gpu_path_are_refused_by_name() -> None:
    ops = [Add("a", "x", "y", "z"), Look("b", "z", [])]
    require_ops("cpp", ops)
    require_ops("cuda", ops[:1])
    with pytest.raises(ConfigError, match="device cuda does not support Look yet; use --device cpu"):
        require_ops("cuda", ops)
    with pytest.raises(ConfigError, match="side table"):
        require("cuda", ["side table"])
