"""Fused layer programs against the ops' meaning, op by op: a fused op that differs, or is left out, is named."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.arrays import Array
from quire.extension import _kernels
from quire.kernels import program as ops
from quire.kernels import special_ops
from quire.kernels.cpp.cpp_attention import paged_attention
from quire.kernels.cpp.cpp_kv_cache import write_kv
from quire.kernels.cpp.fused_ops import TRANSLATIONS, FusedOps, fuse
from quire.kernels.layers import GATED, Activation, Expert, Routing
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.paged_attention import AttentionSpec, Heads, RotarySpec, build_metadata
from quire.kernels.program import INPUT, Activations, LayerInputs, Op, Program, ProgramTimer, live_after
from quire.kernels.quantized import round_to_nearest
from quire.kernels.tensors import scaled
from support.cpp_kernels import CppExperts, CppLinear, CppNorm, cache_shapes
from support.on_tensors import arrays, tensors
from support.rotary import table_of

HEADS, WIDTH, INNER, BLOCK_SIZE = Heads(4, 2, 16), 48, 80, 8
NUM_TOKENS = 7  # a chunk of 6 and a decode
SEEDS = count(1)


def linear(
    in_features: int, out_features: int, dtype: torch.dtype, weight_format: str, activation: Activation = "none", *,
    is_float: bool = False, has_bias: bool = True,
) -> CppLinear:  # fmt: skip
    rows = out_features * (2 if activation in GATED else 1)
    values, bias = (torch.randn(rows, in_features) * in_features**-0.5).to(dtype), torch.randn(rows)
    weight = LinearWeight.dense(values)
    if weight_format != DENSE:
        weight = round_to_nearest(values, weight_format, 32, activation_group_size=32)
    own = bias.to(dtype) if has_bias else None
    return CppLinear(weight, own, dtype=torch.float32 if is_float else None, activation=activation)


def norm(
    width: int, dtype: torch.dtype, *, centers: bool, offset: float | None = None, num_heads: int = 0
) -> CppNorm:
    weight = torch.rand((num_heads, width) if num_heads else width) + 0.5
    bias = torch.randn(width).to(dtype) if centers else None
    return CppNorm(weight.to(dtype), bias, 1e-5, centers, offset)


def layer_ops(layer: int, dtype: torch.dtype, position: str, progress: NDArray[np.int64]) -> list[Op]:
    """Return a layer with every kind of op: rotary and query-key norms where norms come first, neither where last.

    The second layer's linear weights are quantized.
    """
    formats = ("int8", "int4", "int4", "int8") if layer else (DENSE,) * 4
    stem, is_pre = f"layers.{layer}.", position == "pre"
    query_width, kv_width = HEADS.num_heads * HEADS.head_dim, HEADS.num_kv_heads * HEADS.head_dim
    source, centers = ("x", False) if is_pre else (INPUT, True)
    cos_sin = table_of(torch.rand(HEADS.head_dim // 2), 64) if is_pre else None
    norms = [norm(WIDTH, dtype, centers=centers) for _ in range(2)]
    out, summed = ("x", INPUT) if is_pre else (INPUT, None)
    first, second = (ops.NormOp(f"{stem}norm_{i + 1}", norms[i], "x", out, INPUT, summed) for i in range(2))
    if is_pre and layer == 0:
        first = ops.NormOp(first.name, norms[0], INPUT, "x")
    by_head = HEADS[:2] if layer else (0, 0)  # heads with weights of their own
    head_norms = [norm(HEADS.head_dim, dtype, centers=False, num_heads=number) for number in by_head]
    attention: list[Op] = [
        ops.LinearOp(f"{stem}qkv", linear(WIDTH, query_width + 2 * kv_width, dtype, formats[0]), source, "qkv"),
        ops.SplitHeadsOp(f"{stem}split", HEADS),
        *([special_ops.QKNormOp(f"{stem}qk_norm", head_norms[0], head_norms[1], HEADS)] if is_pre else []),
        ops.RotaryWriteOp(f"{stem}rotary", layer, arrays(RotarySpec(HEADS, cos_sin)), write_kv),
        ops.AttentionOp(f"{stem}attention", layer, AttentionSpec(HEADS, 0.3, 5 if layer else None), paged_attention),
        ops.LinearOp(f"{stem}out", linear(query_width, WIDTH, dtype, formats[1]), "attended", "x"),
    ]
    feed_forward: list[Op] = [
        ops.LinearOp(f"{stem}up", linear(WIDTH, INNER, dtype, formats[2], "silu_and_mul"), source, "inner"),
        ops.LinearOp(f"{stem}down", linear(INNER, WIDTH, dtype, formats[3]), "inner", "x"),
    ]
    in_order = [first, *attention, second, *feed_forward] if is_pre else [*attention, first, *feed_forward, second]
    return [*in_order, ops.CountLayerOp(f"{stem}end", progress)]


def parallel_ops(layer: int, dtype: torch.dtype, progress: NDArray[np.int64]) -> list[Op]:
    """Return a layer with the parts that `layer_ops` has not.

    Sublayers that read the same stream, norms of their outputs, a multiplier; norms with weights in float32, those of
    queries and keys over all heads; interleaved rotary over a part of each head, a softcap, and a gate of GELU, in the
    second layer experts.
    """
    stem = f"layers.{layer}."
    query_width, kv_width = HEADS.num_heads * HEADS.head_dim, HEADS.num_kv_heads * HEADS.head_dim
    first = ops.NormOp(f"{stem}norm_1", norm(WIDTH, dtype, centers=False, offset=1.0), "x", "x", INPUT, INPUT)
    if layer == 0:
        first = ops.NormOp(first.name, first.norm, INPUT, "x")
    widths = norm(query_width, dtype, centers=False, offset=0.0), norm(kv_width, dtype, centers=False, offset=1.0)
    table = table_of(torch.rand(HEADS.head_dim // 4), 64)
    feed_forward: list[Op] = [
        ops.LinearOp(f"{stem}up", linear(WIDTH, INNER, dtype, DENSE, "gelu_tanh_and_mul"), "normed", "inner"),
        ops.LinearOp(f"{stem}down", linear(INNER, WIDTH, dtype, DENSE), "inner", "y"),
    ]
    if layer:
        experts = [
            Expert(
                linear(WIDTH, INNER, dtype, "int4", "silu_and_mul"), linear(INNER, WIDTH, dtype, "int8", is_float=True)
            )
            for _ in range(4)
        ]
        mixture = CppExperts(linear(WIDTH, 4, dtype, DENSE, is_float=True), experts, Routing(2, True))
        feed_forward = [special_ops.ExpertsOp(f"{stem}experts", mixture, "normed", "y")]
    attention = AttentionSpec(HEADS, 0.3, softcap=0.8, sinks=torch.randn(4))
    return [
        first,
        ops.LinearOp(f"{stem}qkv", linear(WIDTH, query_width + 2 * kv_width, dtype, DENSE), "x", "qkv"),
        ops.SplitHeadsOp(f"{stem}split", HEADS),
        special_ops.QKNormOp(f"{stem}qk_norm", *widths, HEADS, is_over_heads=True),
        special_ops.ClipOp(f"{stem}clip", HEADS, 0.9),
        ops.RotaryWriteOp(f"{stem}rotary", layer, arrays(RotarySpec(HEADS, table, is_interleaved=True)), write_kv),
        special_ops.PositionScaleOp(f"{stem}position_scale", HEADS, arrays((torch.rand(64) + 1).to(dtype).float())),
        ops.AttentionOp(f"{stem}attention", layer, arrays(attention), paged_attention),
        ops.LinearOp(f"{stem}out", linear(query_width, WIDTH, dtype, DENSE), "attended", "x"),
        special_ops.ScaleOp(f"{stem}multiplier", "x", WIDTH, 0.22),
        ops.NormOp(f"{stem}norm_2", norm(WIDTH, dtype, centers=False), INPUT, "normed"),
        *feed_forward,
        ops.NormOp(f"{stem}norm_3", norm(WIDTH, dtype, centers=True), "y", "y"),
        ops.AddOp(f"{stem}sublayers", "x", "y", "x", WIDTH),
        ops.CountLayerOp(f"{stem}end", progress),
    ]


LATENT = Heads(4, 1, 40)  # 32 dimensions that are values, too, and 8 that are rotated


def latent_ops(layer: int, dtype: torch.dtype, progress: NDArray[np.int64]) -> list[Op]:
    """Return a layer with attention over latents, with two projections of queries, in the second layer with one."""
    stem, rank, query_dim, value_dim = f"layers.{layer}.", 0 if layer else 24, 20, 16
    (num_heads, _, key_dim), latent_dim = LATENT, 32
    nope_dim = query_dim - (key_dim - latent_dim)
    first = ops.NormOp(f"{stem}norm_1", norm(WIDTH, dtype, centers=False), "x", "x", INPUT, INPUT)
    if layer == 0:
        first = ops.NormOp(first.name, first.norm, INPUT, "x")
    width = rank or num_heads * query_dim
    query_norm = norm(rank, dtype, centers=False) if rank else None
    up = ops.LinearOp(f"{stem}query_up", linear(rank or 1, num_heads * query_dim, dtype, DENSE), "query_latent", "up")
    keys = tuple(linear(nope_dim, latent_dim, dtype, DENSE) for _ in range(num_heads))
    kind = "int8" if layer else DENSE
    values = tuple(linear(latent_dim, value_dim, dtype, kind, has_bias=False) for _ in range(num_heads))
    rotary = RotarySpec(LATENT, table_of(torch.rand(4), 64), is_interleaved=layer == 0, rotary_start=latent_dim)
    attention = AttentionSpec(LATENT, 0.3, 5 if layer else None, value_dim=latent_dim)
    return [
        first,
        ops.LinearOp(f"{stem}qkv", linear(WIDTH, width + key_dim, dtype, DENSE), "x", "qkv"),
        special_ops.SplitLatentOp(
            f"{stem}split", query_norm, norm(latent_dim, dtype, centers=False), width, key_dim, latent_dim
        ),
        *([up] if rank else []),
        special_ops.HeadLinearOp(
            f"{stem}keys", keys, (nope_dim, latent_dim), "up" if rank else "query_latent", "query", key_dim - latent_dim
        ),
        ops.RotaryWriteOp(f"{stem}rotary", layer, arrays(rotary), write_kv, value=None),
        ops.AttentionOp(f"{stem}attention", layer, attention, paged_attention, out="latents"),
        special_ops.HeadLinearOp(f"{stem}values", values, (latent_dim, value_dim), "latents", "attended", is_flat=True),
        ops.LinearOp(f"{stem}out", linear(num_heads * value_dim, WIDTH, dtype, DENSE), "attended", "x"),
        ops.CountLayerOp(f"{stem}end", progress),
    ]


def gemma4_ops(layer: int, dtype: torch.dtype, progress: NDArray[np.int64]) -> list[Op]:
    """Return a layer with values that are keys, or in the second with another's cache; inputs by layer, and experts."""
    stem, size, (num_heads, num_kv_heads, head_dim) = f"layers.{layer}.", 32, HEADS
    query_width, kv_width, has_keys = num_heads * head_dim, num_kv_heads * head_dim, layer == 0
    wide = partial(norm, dtype=dtype, centers=False, offset=0.0)
    inputs: list[Op] = [
        ops.LinearOp("inputs", linear(WIDTH, 2 * size, dtype, DENSE), INPUT, "inputs"),
        special_ops.HeadNormOp("inputs_norm", wide(size), "inputs", "inputs", 2, size, is_of_heads=False),
    ]
    keys: list[Op] = [
        special_ops.HeadNormOp(f"{stem}value_norm", wide(head_dim), "key", "value", num_kv_heads, head_dim),
        special_ops.QKNormOp(f"{stem}qk_norm", wide(head_dim), wide(head_dim), HEADS),
    ]
    queries: list[Op] = [special_ops.HeadNormOp(f"{stem}norm", wide(head_dim), "query", "query", num_heads, head_dim)]
    names = ("key", None) if has_keys else (None, None)
    rotary = RotarySpec(HEADS, table_of(torch.rand(head_dim // 2), 64), has_keys=has_keys)
    written = ("key", "value") if has_keys else (None, None)
    pairs = (
        (linear(WIDTH, INNER, dtype, DENSE, "gelu_tanh_and_mul"), linear(INNER, WIDTH, dtype, DENSE, is_float=True))
        for _ in range(4)
    )
    experts = [Expert(*pair) for pair in pairs]
    router = linear(WIDTH, 4, dtype, DENSE, is_float=True)
    mixture = CppExperts(router, experts, Routing(2, True), scales=torch.rand(4))
    return [
        ops.NormOp(f"{stem}norm_1", wide(WIDTH), INPUT, "x"),
        *(inputs if has_keys else []),
        ops.LinearOp(f"{stem}qkv", linear(WIDTH, query_width + has_keys * kv_width, dtype, DENSE), "x", "qkv"),
        ops.SplitHeadsOp(f"{stem}split", HEADS, "qkv", "query", *names),
        *(keys if has_keys else queries),
        ops.RotaryWriteOp(f"{stem}rotary", 0, arrays(rotary), write_kv, "query", *written),
        ops.AttentionOp(f"{stem}attention", 0, AttentionSpec(HEADS, 1.0), paged_attention),
        ops.LinearOp(f"{stem}out", linear(query_width, WIDTH, dtype, DENSE), "attended", "x"),
        ops.NormOp(f"{stem}norm_2", wide(WIDTH), INPUT, "scored"),
        special_ops.ExpertsOp(f"{stem}experts", mixture, "x", "y", "scored"),
        ops.AddOp(f"{stem}sum", "y", INPUT, INPUT, WIDTH),
        ops.LinearOp(f"{stem}gate", linear(WIDTH, size, dtype, DENSE, "gelu_tanh"), INPUT, "gate"),
        special_ops.MultiplyOp(f"{stem}input", "gate", "inputs", layer * size, size, 2 * size),
        ops.LinearOp(f"{stem}input_out", linear(size, WIDTH, dtype, DENSE), "gate", "x"),
        ops.AddOp(f"{stem}input_sum", "x", INPUT, INPUT, WIDTH),
        ops.CountLayerOp(f"{stem}end", progress),
    ]


def int8_cache(generator: torch.Generator) -> Tensor:
    """Return random keys or values in 8 bits, with scales of 0.01."""
    num_kv_heads, head_dim = HEADS.num_kv_heads, HEADS.head_dim
    shape, _ = cache_shapes(4, BLOCK_SIZE, num_kv_heads, head_dim, torch.int8, extra_bytes=4)
    cache = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scales = torch.full((BLOCK_SIZE,), 0.01).view(torch.int8)
    cache.view(4, num_kv_heads, -1)[..., BLOCK_SIZE * head_dim :] = scales
    return cache


OWN_LAYERS = {"latent": latent_ops, "gemma4": gemma4_ops}


@dataclass
class Step:
    """A program, its counter, and a step's inputs with caches of their own."""

    program: Program
    progress: NDArray[np.int64]
    dtype: torch.dtype
    is_quantized: bool = False

    def run(self, program: Program, seed: int) -> dict[str, Tensor]:
        """Return what a program has left behind: its result, the caches, the counter."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(NUM_TOKENS, WIDTH, generator=generator).to(self.dtype)
        shapes = cache_shapes(4, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim, self.dtype)
        if any(isinstance(op, special_ops.SplitLatentOp) for op in self.program.ops):
            shapes = cache_shapes(4, BLOCK_SIZE, LATENT.num_kv_heads, LATENT.head_dim, self.dtype)[0], (4, 0)
        keys, values = ([torch.randn(s, generator=generator).to(self.dtype) for _ in range(2)] for s in shapes)
        if self.is_quantized:
            keys, values = ([int8_cache(generator) for _ in range(2)] for _ in range(2))
        tables = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
        lens = torch.tensor([6, 12], dtype=torch.int32)
        metadata = build_metadata(tables, torch.tensor([0, 6, 7], dtype=torch.int32), lens, BLOCK_SIZE)
        inputs = LayerInputs(*arrays((
            torch.tensor([*range(6), 11]), torch.tensor([0, 1, 2, 3, 4, 5, BLOCK_SIZE + 3]), metadata, keys, values
        )))
        self.progress[:] = 0
        found = {"result": tensors(program.run(arrays(x), inputs))}
        found |= {f"keys {i}": cache for i, cache in enumerate(keys)} | {f"values {i}": c for i, c in enumerate(values)}
        return found | {"progress": torch.from_numpy(self.progress.copy())}


def make(dtype: torch.dtype, position: str, change: Callable[[list[Op]], list[Op]] = lambda found: found) -> Step:
    torch.manual_seed(0)
    progress = np.zeros(1, np.int64)
    if position == "parallel":
        found = [op for layer in range(2) for op in parallel_ops(layer, dtype, progress)]
    elif position in OWN_LAYERS:
        found = [op for layer in range(2) for op in OWN_LAYERS[position](layer, dtype, progress)]
    else:
        found = [op for layer in range(2) for op in layer_ops(layer, dtype, position, progress)]
    return Step(Program(tuple(change(found)), INPUT if position in ("post", "gemma4") else "x"), progress, dtype)


def first_difference(step: Step) -> str | None:
    """Return the first op behind which the fused program has other activations, caches or counts than single ops."""
    in_order = step.program.ops
    for stop, (op, alive) in enumerate(zip(in_order, live_after(in_order, step.program.result), strict=True), 1):
        for result in sorted(alive):
            prefix = Program(in_order[:stop], result)
            seed = next(SEEDS)  # other inputs each time: no memory holds the expected values, of another test either
            fused, expected = step.run(fuse(prefix), seed), step.run(prefix, seed)
            if not all(torch.equal(fused[name], expected[name]) for name in expected):
                return op.name
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", ["pre", "post", "parallel", *OWN_LAYERS])
def test_each_fused_op_has_the_bits_of_its_single_op(position: str, dtype: torch.dtype) -> None:
    step = make(dtype, position)
    assert [type(op) for op in fuse(step.program).ops] == [FusedOps]
    assert first_difference(step) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", ["pre", "parallel"])
def test_fused_ops_over_a_quantized_cache_have_the_bits_of_single_ops(position: str, dtype: torch.dtype) -> None:
    step = make(dtype, position)
    step.is_quantized = True
    assert first_difference(step) is None


COMPUTING = [
    (position, op.name)
    for position in ("pre", "parallel", *OWN_LAYERS)
    for op in make(torch.float32, position).program.ops
    if not isinstance(op, ops.SplitHeadsOp)
]


@pytest.mark.parametrize("isa", _kernels.usable_isas()[:1], indirect=True)  # the translation knows none
@pytest.mark.parametrize(("position", "left_out"), COMPUTING)
def test_op_that_the_interpreter_leaves_out_is_named(
    position: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(torch.float32, position)
    kind = next(type(op) for op in step.program.ops if op.name == left_out)
    real = TRANSLATIONS[kind]
    records = lambda op, buffers: real.records(op, buffers)[: op.name != left_out]  # noqa: E731
    monkeypatch.setitem(TRANSLATIONS, kind, real._replace(records=records))
    assert first_difference(step) == left_out


@dataclass(frozen=True)
class Halve:
    """An op that the C++ interpreter does not know."""

    name: str
    x: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.x,)

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        activations[self.x] = scaled(activations[self.x], 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("after", "x"), [("split", "query"), ("qk_norm", "key"), ("rotary", "query"), ("down", "x")])
def test_unknown_op_runs_by_itself_between_fused_ones(
    after: str, x: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    def change(found: list[Op]) -> list[Op]:
        return [new for op in found for new in ([op, Halve(f"{op.name}.half", x)] if op.name.endswith(after) else [op])]

    step = make(dtype, "pre", change)
    with caplog.at_level("INFO"):
        fused = fuse(step.program)
    assert [type(op) for op in fused.ops] == [FusedOps, Halve] * 2 + [FusedOps]
    assert f"2 of them: layers.0.{after}.half, layers.1.{after}.half" in caplog.text
    assert first_difference(step) is None


def test_timed_ops_have_the_same_bits_and_a_time_each() -> None:
    step = make(torch.float32, "pre", lambda found: [*found[:-1], Halve("half", "x"), found[-1]])
    program = fuse(step.program)
    expected, timer = step.run(program, seed=1), ProgramTimer(program)
    for _ in range(2):
        found = step.run(timer.timed, seed=1)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    times = timer.stop()
    assert [time.name for time in times if time.kind != "SplitHeadsOp"] == [
        op.name for op in step.program.ops if not isinstance(op, ops.SplitHeadsOp)
    ]
    assert all(time.seconds > 0 for time in times if time.kind in {"LinearOp", "Halve"})
    found = step.run(timer.untimed, seed=1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@dataclass
class Hook:
    """A gather that notes what it is called with, and appends the doubled activation; in C where it has an address."""

    num_own: int
    is_in_c: bool
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_long, ctypes.c_long)
        self._function = signature(self._in_c)

    @property
    def width(self) -> int:
        return 2 * self.num_own

    @property
    def address(self) -> tuple[int, int] | None:
        return (ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0) if self.is_in_c else None

    def __call__(self, own: Array) -> Array:
        self.calls.append(f"{len(own)} rows of {own.shape[1]} floats")
        return np.concatenate([own, 2 * own], axis=1)

    def _in_c(self, context: int, own: int, rows: int, num_tokens: int, element_bytes: int) -> None:
        assert element_bytes == 4

        def at(place: int, width: int) -> Array:
            memory = (ctypes.c_float * (num_tokens * width)).from_address(place)
            return np.frombuffer(memory, np.float32).reshape(num_tokens, width)

        at(rows, self.width)[:] = self(at(own, self.num_own))


@pytest.mark.parametrize("is_in_c", [False, True])
def test_gather_is_called_between_ops(is_in_c: bool) -> None:
    half = INNER // 2

    def change(found: list[Op]) -> list[Op]:
        changed: list[Op] = []
        for op in found:
            if op.name != "layers.1.up":
                changed.append(op)
                continue
            assert isinstance(op, ops.LinearOp)
            weight = torch.randn(half, op.linear.sizes[0], generator=torch.Generator().manual_seed(3))
            own = replace(op, linear=CppLinear(LinearWeight.dense(weight)))
            changed += [own, special_ops.GatherOp("layers.1.gather", "inner", Hook(half, is_in_c))]
        return changed

    step = make(torch.float32, "pre", change)
    hook = next(op.hook for op in step.program.ops if isinstance(op, special_ops.GatherOp))
    fused = fuse(step.program)
    assert [type(op) for op in fused.ops] == [FusedOps] if is_in_c else [FusedOps, special_ops.GatherOp, FusedOps]
    expected = step.run(step.program, 0)
    found = step.run(fused, 0)
    assert hook.calls == 2 * [f"{NUM_TOKENS} rows of {half} floats"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_float16_is_left_to_single_ops() -> None:
    program = make(torch.float16, "pre").program
    assert fuse(program) is program
