"""Gated delta nets and Mamba-2: reference and kernels against the formulas, and bits that no division changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.arrays import dtype_name
from quire.core.errors import ConfigError
from quire.core.plan import MAX_SNAPSHOTS
from quire.engine.parallel.rank_messages import MemoryLayout
from quire.engine.parallel.shared_memory import SharedRanks
from quire.extension.isas import usable_isas
from quire.kernels.back_end import require_ops
from quire.kernels.choice import choose_back_end
from quire.kernels.delta_net import DeltaHeads, DeltaInputs, DeltaNetSpec, StateRows, StateShape, ring_length
from quire.kernels.mamba import MambaHeads, MambaSpec, NormSpan
from quire.kernels.reference import delta_net as reference
from quire.kernels.reference.mamba import mamba as reference_mamba
from quire.kernels.special_ops import DeltaNetOp, GateOp, MambaOp
from quire.kernels.torch_arrays import to_array
from quire.model.sharding import Range, shifted
from quire.model.spec import Mamba
from support.on_tensors import on_tensors
from support.thread_ranks import in_threads, make_ranks

ISAS = usable_isas()
HEADS = DeltaHeads(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32)
ROWS = DeltaHeads(num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=16, has_row_decays=True)  # Kimi
MAMBA = MambaHeads(num_key_heads=2, num_value_heads=22, key_dim=32, value_dim=16)  # 11 heads of a group: two pieces
NUM_SLOTS = 6
MAX_TRUNCATED = 5


class Entry(NamedTuple):
    """Tokens [start, stop) of the inputs, and the slots that they read and write."""

    start: int
    stop: int
    read: int
    write: int
    committed: int
    commit_to: int
    snapshots: tuple[tuple[int, int], ...] = ()


Spec = DeltaNetSpec | MambaSpec
Inputs = tuple[Tensor, ...]  # a sequence's: those of a gated delta net, or x of a Mamba-2


def make_spec(heads: DeltaHeads = HEADS, taps: int = 4) -> DeltaNetSpec:
    generator = torch.Generator().manual_seed(sum(heads))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = heads.num_value_heads
    return DeltaNetSpec(
        heads, random(taps, heads.channels) * 0.6, random(values).exp() * 0.3,
        random(heads.num_decays), 1 + 0.3 * random(heads.value_dim), 1e-6, ring_length(taps, MAX_TRUNCATED),
        is_gate_sigmoid=heads.has_row_decays,
    )  # fmt: skip


def make_mamba(heads: MambaHeads = MAMBA, taps: int = 4, **changes: object) -> MambaSpec:
    generator = torch.Generator().manual_seed(sum(heads))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = heads.num_value_heads
    spec = MambaSpec(
        heads, random(taps, heads.channels) * 0.6, random(heads.channels) * 0.3, random(values).exp() * 0.3,
        random(values), random(values), 1 + 0.3 * random(heads.width), 1e-5, ring_length(taps, MAX_TRUNCATED),
    )  # fmt: skip
    return replace(spec, **changes)


SPECS = pytest.mark.parametrize(
    "spec", [make_spec(), make_spec(ROWS), make_mamba()], ids=["delta net", "decays of rows", "mamba"]
)


def make_inputs(
    num_tokens: int, heads: DeltaHeads = HEADS, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    widths = [heads.channels, heads.width, heads.num_value_heads, heads.num_decays]
    if isinstance(heads, MambaHeads):
        widths = [heads.width + heads.inputs]
    return tuple(torch.randn(num_tokens, width, generator=generator).to(dtype) for width in widths)


class Runner:
    """Slots of a layer, which hold NaN at first, and steps over them."""

    def __init__(self, compute: Callable[..., Tensor], spec: Spec, dtype: torch.dtype) -> None:
        self._compute, self._spec = compute, spec
        shape = StateShape(spec.heads, spec.length, dtype_name(to_array(torch.empty(0, dtype=dtype)).dtype))
        self.states = torch.full((NUM_SLOTS, shape.num_bytes), 0xFF, dtype=torch.uint8)
        self._state_bytes = shape.ring_offset

    def step(self, *rows: tuple[Inputs, Entry]) -> list[Tensor]:
        entries, counts = [entry for _, entry in rows], [entry.stop - entry.start for _, entry in rows]
        parts = zip(*([part[entry.start : entry.stop] for part in inputs] for inputs, entry in rows), strict=True)
        snapshots = [
            [*entry.snapshots, *[(-1, -1)] * (MAX_SNAPSHOTS - len(entry.snapshots))] for entry in entries
        ]
        columns = ([getattr(each, name) for each in entries] for name in ("read", "committed", "write", "commit_to"))
        slots = StateRows(*(torch.tensor(each, dtype=torch.int32) for each in (*columns, snapshots)))
        context_lens = torch.tensor([entry.stop for entry in entries], dtype=torch.int32)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        inputs = [*map(torch.cat, parts)]
        taken = inputs[0] if isinstance(self._spec, MambaSpec) else DeltaInputs(*inputs)
        out = self._compute(self._spec, taken, context_lens, self.states, starts, slots)
        return list(out.split(counts))

    def state(self, slot: int) -> bytes:
        """Return the bits of S in a slot."""
        return bytes(self.states[slot, : self._state_bytes].numpy())


def whole(count: int, write: int = 0, **changes: object) -> Entry:
    """Return the first tokens of a sequence, all of which its state has seen."""
    return Entry(0, count, -1, write, 0, count)._replace(**changes)


def in_float64(spec: DeltaNetSpec, inputs: Inputs) -> NDArray[np.float64]:
    """Return the results of a sequence by the formulas, token by token.

    Yang et al. 2025, Qwen3-Next; with decays of rows: Kimi Team 2025, Kimi Linear.
    """
    heads, (u, z, shares, decays) = spec.heads, (each.double().numpy() for each in inputs)
    weight, rate, bias, norm = (
        each.double().numpy() for each in (spec.conv_weight, spec.rate, spec.rate_bias, spec.norm_weight)
    )
    z, bias = z.reshape(-1, heads.num_value_heads, heads.value_dim), bias.reshape(heads.num_value_heads, -1)
    decays = decays.reshape(-1, *bias.shape)  # one for each head, or for each row of its state
    padded = np.concatenate([np.zeros((spec.taps - 1, heads.channels)), u])
    sums = sum(weight[tap] * padded[tap : tap + len(u)] for tap in range(spec.taps))
    keys, group = heads.num_key_heads * heads.key_dim, heads.num_value_heads // heads.num_key_heads
    q, k, v = np.split(sums / (1 + np.exp(-sums)), [keys, 2 * keys], axis=1)
    state, found = np.zeros((heads.num_value_heads, heads.key_dim, heads.value_dim)), np.empty(z.shape)
    for t in range(len(u)):
        for h in range(heads.num_value_heads):
            of = h % heads.num_key_heads if spec.is_tiled else h // group
            key_head = slice(of * heads.key_dim, (of + 1) * heads.key_dim)
            query, key, value = q[t, key_head], k[t, key_head], v[t, h * heads.value_dim : (h + 1) * heads.value_dim]
            query, key = (each / np.sqrt(each @ each + 1e-6) for each in (query, key))
            state[h] *= np.exp(-rate[h] * np.log1p(np.exp(decays[t, h] + bias[h])))[:, None]
            state[h] += np.outer(key, (value - key @ state[h]) * spec.max_share / (1 + np.exp(-shares[t, h])))
            out = query @ state[h] / np.sqrt(heads.key_dim)
            normed = out / np.sqrt((out**2).mean() + spec.norm_eps)
            found[t, h] = norm * normed * (1 if spec.is_gate_sigmoid else z[t, h]) / (1 + np.exp(-z[t, h]))
    return found.reshape(len(u), -1)


def mamba_in_float64(spec: MambaSpec, inputs: Inputs) -> NDArray[np.float64]:
    """Return the results of a sequence by the formulas (Dao and Gu 2024; Granite 4 H, Falcon-H1), token by token."""
    heads, (x,) = spec.heads, (each.double().numpy() for each in inputs)
    weight, rate, bias, skip = (
        each.double().numpy() for each in (spec.conv_weight, spec.rate, spec.rate_bias, spec.skip)
    )
    count, keys, group = heads.num_value_heads, heads.num_key_heads * heads.key_dim, heads.width // heads.num_key_heads
    z, u, dt = np.split(x, [heads.width, heads.width + heads.channels], axis=1)
    padded = np.concatenate([np.zeros((spec.taps - 1, heads.channels)), u])
    sums = sum(weight[tap] * padded[tap : tap + len(u)] for tap in range(spec.taps))
    sums = sums if spec.conv_bias is None else sums + spec.conv_bias.double().numpy()
    v, k, q = np.split(sums / (1 + np.exp(-sums)), [heads.width, heads.width + keys], axis=1)
    state, found = np.zeros((count, heads.key_dim, heads.value_dim)), np.empty(z.shape)
    for t in range(len(u)):
        step = np.log1p(np.exp(spec.rate_factor * dt[t] + bias))
        for h in range(count):
            of = h // (count // heads.num_key_heads)
            key_head, own = (slice(i * dim, (i + 1) * dim) for i, dim in ((of, heads.key_dim), (h, heads.value_dim)))
            state[h] = np.exp(-rate[h] * step[h]) * state[h] + np.outer(k[t, key_head], step[h] * v[t, own])
            found[t, own] = q[t, key_head] @ state[h] + skip[h] * v[t, own]
    gate = spec.gate_factor * z / (1 + np.exp(-spec.gate_factor * z))
    found = found if spec.is_norm_first else found * gate
    if spec.norm_weight is not None:
        groups = found.reshape(len(u), -1, group)
        groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + spec.norm_eps)
        found = groups.reshape(len(u), -1) * spec.norm_weight.double().numpy()
    return found * gate if spec.is_norm_first else found


def computed_by(isa: str, spec: Spec) -> Callable[..., Tensor]:
    """Return the op of a layer by the kernels of an instruction set, or by the reference."""
    is_mamba = isinstance(spec, MambaSpec)
    if isa == "reference":
        return reference_mamba if is_mamba else reference.delta_net
    back_end = choose_back_end("cpu", isa=isa)
    return on_tensors(back_end.mamba if is_mamba else back_end.delta_net)


@pytest.mark.parametrize(
    ("heads", "taps"),
    [(HEADS, 4), (DeltaHeads(1, 3, 48, 16), 1), (DeltaHeads(3, 3, 16, 64), 16), (ROWS, 4),
     (DeltaHeads(3, 3, 48, 64, has_row_decays=True), 2)],
    ids=str,
)
@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_results_are_those_of_the_formulas_in_float64(
    heads: DeltaHeads, taps: int, isa: str, is_tiled: bool
) -> None:
    spec, inputs = replace(make_spec(heads, taps), is_tiled=is_tiled, max_share=1.0 + is_tiled), make_inputs(70, heads)
    expected = torch.from_numpy(in_float64(spec, inputs))
    (found,) = Runner(computed_by(isa, spec), spec, torch.float32).step((inputs, whole(70)))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    assert expected.abs().max() > 3


@pytest.mark.parametrize(
    "spec",
    [
        make_mamba(), make_mamba(MambaHeads(1, 3, 16, 64), 1, conv_bias=None),
        make_mamba(MambaHeads(3, 3, 64, 32), 16, is_norm_first=True, gate_factor=0.7, rate_factor=1.3),
        make_mamba(MambaHeads(1, 40, 16, 16), 2, norm_weight=None, gate_factor=0.4, is_norm_first=True),
    ],
    ids=["groups", "one group, no bias", "norm first, factors", "no norm"],
)  # fmt: skip
@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_results_of_mamba_are_those_of_the_formulas_in_float64(spec: MambaSpec, isa: str) -> None:
    inputs = make_inputs(70, spec.heads)
    expected = torch.from_numpy(mamba_in_float64(spec, inputs))
    (found,) = Runner(computed_by(isa, spec), spec, torch.float32).step((inputs, whole(70)))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    assert expected.abs().max() > 3


@pytest.mark.parametrize("is_norm_first", [False, True])
@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_ranks_add_the_squares_of_a_norm_that_they_divide(isa: str, is_norm_first: bool) -> None:
    """Of two groups of three heads, the first is divided between two ranks. Cut anywhere, a rank has the same bits."""
    spec, mamba = make_mamba(MambaHeads(2, 6, 16, 16), is_norm_first=is_norm_first), Mamba(2, 6, 16, 16, taps=4)
    inputs = make_inputs(30, spec.heads)
    (expected,) = Runner(computed_by(isa, spec), spec, torch.float32).step((inputs, whole(30)))

    def columns(weight: Tensor | None, ranges: Sequence[Range]) -> Tensor:
        assert weight is not None
        return torch.cat([weight[..., slice(*each)] for each in ranges], dim=-1).contiguous()

    def compute(ranks: SharedRanks) -> Tensor:
        shard, hook = ranks.shard, ranks.sum(2)
        heads, rows = shard.heads(mamba), shard.mamba_ranges(mamba)
        channels = shifted(rows[1:4], mamba.sections[1:4])
        own = replace(
            spec, heads=MambaHeads(heads.num_kv_heads, heads.num_heads, 16, 16),
            conv_weight=columns(spec.conv_weight, channels), conv_bias=columns(spec.conv_bias, channels),
            norm_weight=columns(spec.norm_weight, [shard.mixed_cut(mamba).of(shard.rank)]),
            span=NormSpan(on_tensors(hook) if isa == "reference" else hook, 2, heads.kv[0], 48),
            **{name: columns(getattr(spec, name), [heads.query]) for name in ("rate", "rate_bias", "skip")},
        )  # fmt: skip
        x = columns(inputs[0], shifted(rows, mamba.sections))
        whole_step, runner = (Runner(computed_by(isa, own), own, torch.float32) for _ in range(2))
        (found,) = whole_step.step(((x,), whole(30)))
        parts = runner.step(((x,), whole(13))) + runner.step(((x,), Entry(13, 30, 0, 0, 13, 30)))
        assert torch.equal(torch.cat(parts), found)
        return found

    ranks = make_ranks(3, MemoryLayout(1 << 12, 1, 1), "reduce")
    found = torch.cat(in_threads(ranks, compute), dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [HEADS, ROWS], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_heads_in_tiles_are_kept_like_heads_in_groups(isa: str, heads: DeltaHeads) -> None:
    """A slot and its ring behind drafts, with value heads that share a key apart from each other."""
    spec, inputs = replace(make_spec(heads), is_tiled=True), make_inputs(40, heads)
    (expected,) = Runner(computed_by(isa, spec), spec, torch.float32).step((inputs, whole(40)))
    runner = Runner(computed_by(isa, spec), spec, torch.float32)
    runner.step((inputs, whole(20, commit_to=15, snapshots=((12, 3),))))
    for entry in (Entry(20, 40, 0, 1, 15, 40), Entry(12, 40, 3, 3, 12, 40)):
        assert torch.equal(runner.step((inputs, entry))[0], expected[entry.start :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ["reference", *ISAS])
@SPECS
def test_no_division_of_tokens_changes_a_bit(spec: Spec, dtype: torch.dtype, isa: str) -> None:
    """Cuts, tokens that are taken back, states that lag, snapshots, other slots and late tokens, with another row."""
    compute, count = computed_by(isa, spec), 24 if isa == "reference" else 70
    inputs, wrong, other = (make_inputs(count, spec.heads, dtype, seed) for seed in (1, 2, 3))
    plain = Runner(compute, spec, dtype)
    expected, alone = plain.step((inputs, whole(count)))[0], Runner(compute, spec, dtype).step((other, whole(9)))[0]
    for cut in range(1, count):
        runner = Runner(compute, spec, dtype)
        lag, back = min(cut % 4, cut), min(cut, 1 + cut % 3)  # not yet in S; to a snapshot
        first = whole(cut, commit_to=cut - lag, snapshots=((cut - back, 3),) if lag < back < cut else ())
        found, beside = runner.step((inputs, first), (other, whole(9, write=1)))
        drafts = min(2, count - cut)
        drafted = tuple(torch.cat([own[:cut], bad[cut:]]) for own, bad in zip(inputs, wrong, strict=True))
        committed = cut - lag
        if lag:
            (late,) = runner.step((inputs, Entry(cut - 1, cut, 0, -1, committed, committed)))
            assert torch.equal(late, found[-1:]), f"a late token before {cut}"
        runner.step((drafted, Entry(cut, cut + drafts, 0, 0, committed, cut)), (other, Entry(9, 20, 1, 1, 9, 20)))
        before = runner.state(0)
        (rest,) = runner.step((inputs, Entry(cut, count, 0, 2, cut, count)))
        assert torch.equal(torch.cat([found, rest]), expected), f"cut at {cut}"
        assert runner.state(2) == plain.state(0), f"S behind a cut at {cut}"
        assert runner.state(0) == before, "a slot that is only read"
        if first.snapshots:
            (rest,) = runner.step((inputs, Entry(cut - back, count, 3, 4, cut - back, count)))
            assert torch.equal(rest, expected[cut - back :]), f"behind a snapshot {back} before {cut}"
            assert runner.state(4) == plain.state(0)
        assert torch.equal(beside, alone)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@SPECS
def test_snapshots_near_the_start_of_a_step_in_place_are_whole(spec: Spec, isa: str) -> None:
    """The inputs behind such a snapshot are those of the step before, in the ring that the step writes again."""
    inputs, runner = make_inputs(30, spec.heads), Runner(computed_by(isa, spec), spec, torch.float32)
    (expected,) = runner.step((inputs, whole(30)))
    for start, lag, stop in ((15, 0, 24), (14, 0, 30), (13, 5, 23), (15, 5, 21)):
        runner.step((inputs, whole(start, commit_to=start - lag)))
        snapshots = ((start - lag + 1, 3), (16, 4))
        runner.step((inputs, Entry(start, stop, 0, 0, start - lag, max(16, stop - 5), snapshots)))
        for position, slot in snapshots:
            (rest,) = runner.step((inputs, Entry(position, 30, slot, 5, position, 30)))
            assert torch.equal(rest, expected[position:]), f"{position}, of a step from {start} to {stop}"


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@SPECS
def test_a_snapshot_has_nothing_of_what_its_slot_held(spec: Spec, isa: str) -> None:
    """It may be stored, and read by others: it is a function of its tokens, whatever they were divided into."""
    inputs, found = make_inputs(30, spec.heads), set[bytes]()
    for held, cut in ((0xFF, 0), (0x55, 15), (0, 2)):
        runner = Runner(computed_by(isa, spec), spec, torch.float32)
        runner.states[:] = held
        if cut:
            runner.step((inputs, whole(cut)))
        runner.step((inputs, Entry(cut, 30, 0 if cut else -1, 0, cut, 30, ((16, 3),))))
        ring_bytes = 4 * spec.length * spec.heads.inputs
        found.add(bytes(runner.states[3, : StateShape(spec.heads, spec.length, "float32").ring_offset + ring_bytes]))
    assert len(found) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "spec", [make_spec(DeltaHeads(2, 6, 32, 16), 3), make_spec(ROWS, 3), make_mamba(taps=3)],
    ids=["delta net", "decays of rows", "mamba"],
)  # fmt: skip
def test_kernels_agree_with_the_reference(spec: Spec, dtype: torch.dtype, isa: str) -> None:
    inputs = [make_inputs(90, spec.heads, dtype, seed) for seed in range(2)]
    ours, plain = (Runner(computed_by(name, spec), spec, dtype) for name in (isa, "reference"))
    steps = (
        [whole(40, commit_to=37, snapshots=((36, 3), (33, 4))), whole(1, write=1)],
        [Entry(40, 90, 0, 0, 37, 90), Entry(1, 4, 1, 2, 1, 2)],
    )
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for entries in steps:
        pairs = list(zip(inputs, entries, strict=True))
        for found, expected in zip(ours.step(*pairs), plain.step(*pairs), strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for slot in (0, 2, 3, 4):
        states = (torch.frombuffer(bytearray(each.state(slot)), dtype=torch.float32) for each in (ours, plain))
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry(8, 20, 0, 0, 8, 10), "more tokens behind a state than its ring holds"),
        (Entry(8, 9, 0, 0, 9, 9), "a state of other tokens than those before a step"),
        (Entry(8, 9, -1, 0, 8, 9), "a state of other tokens than those before a step"),
        (Entry(8, 9, 0, 0, 8, 10), "a state of other tokens than those before a step"),
        (Entry(8, 9, 0, 0, 8, 9, ((8, 1),)), "a snapshot of tokens that no step has"),
    ],
    ids=str,
)
@SPECS
def test_plans_that_cannot_be_are_errors(spec: Spec, entry: Entry, message: str) -> None:
    runner, inputs = Runner(computed_by(ISAS[0], spec), spec, torch.float32), make_inputs(20, spec.heads)
    runner.step((inputs, whole(8)))
    with pytest.raises(ValueError, match=message):
        runner.step((inputs, entry))


def test_gpus_are_refused_by_name() -> None:
    net = DeltaNetOp("delta", 0, make_spec(), reference.delta_net, "x", "rates", "y")
    mamba = MambaOp("mamba", 0, make_mamba(), reference_mamba, "x", "y")
    for op, name in ((net, "DeltaNet"), (mamba, "Mamba"), (GateOp("gate", "x", "y", 8, reference.gate), "Gate")):
        with pytest.raises(ConfigError, match=f"device cuda does not support {name} yet"):
            require_ops("cuda", [op])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_gates_agree_with_the_reference(dtype: torch.dtype, isa: str) -> None:
    x, gates = make_inputs(5, dtype=dtype)[0][:, :40], make_inputs(5, dtype=dtype, seed=2)[0][:, 5:45]
    found = on_tensors(choose_back_end("cpu", isa=isa).gate)(x, gates)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, reference.gate(x, gates), rtol=1e-6, atol=tolerance)
    assert found.data_ptr() != x.data_ptr()
