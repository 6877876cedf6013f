"""The Python interpreter: which activations stay alive, and which ops a back end refuses."""

from dataclasses import dataclass, replace

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.back_end import CPU, SUPPORT, require_ops
from quire.kernels.paged_attention import AttentionSpec, Heads, RotarySpec, build_metadata
from quire.kernels.program import (
    INPUT,
    Activations,
    AddOp,
    AttentionOp,
    LayerInputs,
    Op,
    Program,
    RotaryWriteOp,
)
from quire.kernels.reference.kv_cache import write_kv
from quire.kernels.reference.paged_attention import paged_attention


@dataclass(frozen=True)
class Look:
    """Adds positions to x, and notes which activations there are."""

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
        activations["y"] = activations[self.x] + inputs.positions[:, None]


def inputs_at(*positions: int) -> LayerInputs:
    starts = torch.arange(3, dtype=torch.int32)
    metadata = build_metadata(torch.zeros(2, 1, dtype=torch.int32), starts, torch.ones(2, dtype=torch.int32), 8)
    return LayerInputs(torch.tensor(positions), torch.tensor([-1, -1]), metadata, [], [])


def test_activations_are_dropped_after_their_last_reader() -> None:
    seen: list[set[str]] = []
    ops: list[Op] = [Look("a", INPUT, seen), AddOp("b", "y", "y", "z", width=3), Look("c", "z", seen)]
    result = Program(tuple(ops), "y").run(torch.ones(2, 3), inputs_at(1, 10))
    assert result.tolist() == [[5.0] * 3, [32.0] * 3]
    assert seen == [{INPUT}, {"z"}]


def test_ops_without_a_gpu_path_are_refused_by_name() -> None:
    ops = [AddOp("a", "x", "y", "z", width=3), Look("b", "z", [])]
    require_ops("cpp", ops)
    require_ops("cuda", ops[:1])
    with pytest.raises(ConfigError, match="device cuda does not support Look yet; use --device cpu"):
        require_ops("cuda", ops)


def test_features_without_a_gpu_path_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(4, 2, 16)
    rotary = RotaryWriteOp("a", 0, RotarySpec(heads, is_interleaved=True), write_kv)
    attention = AttentionOp("b", 0, AttentionSpec(heads, 1.0, softcap=50.0), paged_attention)
    sunk = replace(attention, spec=AttentionSpec(heads, 1.0, sinks=torch.zeros(4)))
    for back_end in ("cpp", "cuda"):
        require_ops(back_end, [rotary, attention, sunk])
    for feature, op in {
        "interleaved rotary": rotary, "softcap on attention scores": attention, "attention sinks": sunk,
    }.items():  # fmt: skip
        monkeypatch.setitem(SUPPORT, feature, CPU)
        with pytest.raises(ConfigError, match=f"device cuda does not support {feature} yet; use --device cpu"):
            require_ops("cuda", [op])
    plain = replace(rotary, spec=RotarySpec(heads)), replace(attention, spec=AttentionSpec(heads, 1.0))
    require_ops("cuda", plain)
