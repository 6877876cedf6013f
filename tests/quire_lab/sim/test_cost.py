"""What the cost model says is what can be worked out by hand."""

from dataclasses import replace

import pytest

from quire.core.plan import BlockCopy, StepPlan
from quire.model.config import spec_from_config
from quire.model.quantization import WHOLE_ROW, Quantization, WeightScheme
from quire.model.sharding import Mode
from quire_lab.sim.hardware import (
    CONTIGUOUS_ATTENTION_FACTOR,
    CostModel,
    CurvePoint,
    Exchanges,
    Hardware,
    exchange_mode,
)
from quire_lab.sim.models import CONFIGS

OPT_13B = spec_from_config(CONFIGS["OPT-13B"])
MACHINE = Hardware(
    "a machine", memory_bytes=1e11, bytes_per_s=1e12, flops_per_s=1e14, bandwidth_share=1, flops_share=1,
    link_bytes_per_s=1e11, host_bytes_per_s=1e10, copy_s=0, collective_s=1e-5, step_s=0.001,
)  # fmt: skip
LAYER_WEIGHTS, HEAD_WEIGHTS = 40 * 12 * 5120**2, 50272 * 5120


def decode(num_seqs: int, context: int) -> StepPlan:
    rows = list(range(num_seqs))
    return StepPlan(rows=rows, starts=[context - 1] * num_seqs, counts=[1] * num_seqs, sample_rows=rows)


def test_decode_reads_weights_and_contexts() -> None:
    cost = CostModel(OPT_13B, MACHINE, attention_factor=CONTIGUOUS_ATTENTION_FACTOR)
    weights_s = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / 1e12
    assert cost.step_s(decode(1, 1000)) == pytest.approx(0.001 + weights_s + 1000 * 819_200 / 1e12)
    assert cost.step_s(decode(8, 1000)) == pytest.approx(0.001 + weights_s + 8 * 1000 * 819_200 / 1e12)


def test_quantized_weights_are_read_in_fewer_bytes() -> None:
    scheme = WeightScheme("int4", 128, 128)
    quantization = Quantization("int4", scheme, WeightScheme("int8", 128, 128))
    cost = CostModel(OPT_13B, MACHINE, attention_factor=CONTIGUOUS_ATTENTION_FACTOR, quantization=quantization)
    weights_s = ((0.5 + 4 / 128) * LAYER_WEIGHTS + (1 + 4 / 128) * HEAD_WEIGHTS) / 1e12
    assert cost.step_s(decode(1, 1000)) == pytest.approx(0.001 + weights_s + 1000 * 819_200 / 1e12)


def test_quantized_weights_save_reading_and_no_arithmetic_of_a_measured_machine() -> None:
    curve = (CurvePoint(1, 2e-12), CurvePoint(8, 3e-12))
    machine = replace(MACHINE, curve=curve, dtype="float16", step_s=0)
    quantization = Quantization("int8", WeightScheme("int8", WHOLE_ROW, 128))
    plain, found = CostModel(OPT_13B, machine), CostModel(OPT_13B, machine, quantization=quantization)
    saved = (0.5 - 4 / 128 / 2) * 2e-12 * LAYER_WEIGHTS
    for num_seqs in (1, 8):
        assert plain.step_s(decode(num_seqs, 1)) - found.step_s(decode(num_seqs, 1)) == pytest.approx(saved)


def test_paged_attention_takes_the_papers_factor_longer() -> None:
    contiguous = CostModel(OPT_13B, MACHINE, attention_factor=CONTIGUOUS_ATTENTION_FACTOR).step_s(decode(8, 1000))
    paged = CostModel(OPT_13B, MACHINE).step_s(decode(8, 1000))
    assert paged - contiguous == pytest.approx(0.23 * 8 * 1000 * 819_200 / 1e12)


def test_devices_wait_for_the_one_with_the_most_heads() -> None:
    """One of three devices has 14 of 40 heads."""
    cost = CostModel(OPT_13B, MACHINE, num_devices=3, attention_factor=CONTIGUOUS_ATTENTION_FACTOR)
    longer = cost.step_s(decode(1, 2000)) - cost.step_s(decode(1, 1000))
    assert longer == pytest.approx(1000 * 819_200 * 14 / 40 / 1e12)


def test_prefill_multiplies() -> None:
    plan = StepPlan(rows=[0], starts=[0], counts=[2048], sample_rows=[0])
    cost = CostModel(OPT_13B, MACHINE, attention_factor=1)
    multiplied_s, head_s = 2 * LAYER_WEIGHTS * 2048 / 1e14, 2 * HEAD_WEIGHTS / 1e12
    attended_s = 4 * 5120 * 40 * 2048 * 2049 / 2 / 1e14
    assert cost.step_s(plan) == pytest.approx(0.001 + multiplied_s + head_s + attended_s)


def test_devices_share_the_work_and_talk() -> None:
    cost = CostModel(OPT_13B, MACHINE, num_devices=4, attention_factor=1)
    alone_s = CostModel(OPT_13B, MACHINE, attention_factor=1).step_s(decode(2, 500)) - 0.001
    talk_s = 80 * (1e-5 + 2 * 3 / 4 * 2 * 5120 * 2 / 1e11)
    assert cost.step_s(decode(2, 500)) == pytest.approx(0.001 + alone_s / 4 + talk_s)


def test_ranks_exchange_what_their_mode_does() -> None:
    """The model has 40 layers of 5,120 dimensions and 20,480 inner ones."""
    assert Exchanges.of(OPT_13B, 2, 2, "gather") == (160, 40 * 2 * (3 * 5120 + 20480) // 2)
    assert Exchanges.of(OPT_13B, 2, 2, "reduce") == (80, 80 * 4 * 5120)
    assert Exchanges.of(OPT_13B, 2, 4, "reduce") == (80, 80 * 4 * 5120 * 3)
    assert Exchanges.of(OPT_13B, 2, 4, "reduce", 100) == (160, 80 * 100 * (4 + 2) * 5120 * 3 // 4)
    assert Exchanges.of(OPT_13B, 2, 4, "all-reduce", 100) == (80, 80 * 2 * 100 * 5120 * 2 * 3 // 4)
    assert [exchange_mode("reduce", device) for device in ("cpu", "cuda")] == ["reduce", "all-reduce"]
    silent = CostModel(OPT_13B, MACHINE, num_devices=4).step_s(decode(2, 500)) - 80 * (1e-5 + 1.5 * 2 * 5120 * 2 / 1e11)
    expected: dict[Mode, tuple[int, int]] = {
        "gather": (160, 2 * 40 * 2 * 35840 * 3 // 4), "reduce": (80, 2 * 80 * 4 * 5120 * 3),
    }  # fmt: skip
    for mode, (number, num_bytes) in expected.items():
        cost = CostModel(OPT_13B, MACHINE, num_devices=4, mode=mode)
        assert cost.step_s(decode(2, 500)) == pytest.approx(silent + number * 1e-5 + num_bytes / 1e11)


def test_copies_and_swaps_cost_their_bytes() -> None:
    cost, block_bytes = CostModel(OPT_13B, MACHINE), 16 * 819_200
    plan = decode(1, 10)
    before_s = cost.step_s(plan)
    plan.copies.append(BlockCopy(0, 1))
    assert cost.step_s(plan) - before_s == pytest.approx(2 * block_bytes / 1e12)
    plan.swap_outs.extend([BlockCopy(0, 1), BlockCopy(1, 2)])
    assert cost.swap_s(2) == pytest.approx(2 * block_bytes / 1e10)
    assert cost.step_s(plan) - before_s == pytest.approx(2 * block_bytes / 1e12 + cost.swap_s(2))


def test_window_bounds_what_is_read() -> None:
    windowed = spec_from_config(CONFIGS["LLaMA-7B"] | {"architectures": ["MistralForCausalLM"], "sliding_window": 100})
    cost = CostModel(windowed, MACHINE)
    assert cost.step_s(decode(4, 200)) == cost.step_s(decode(4, 2000))


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1.0), (8, 1.0), (12, 1.5), (16, 2.0), (32, 4.0)])
def test_measured_curve_wins(num_tokens: int, expected: float) -> None:
    machine = Hardware(
        "measured", 1e11, 1e30, 1e30, step_s=0.0, dtype="bfloat16", curve=(CurvePoint(8, 1.0), CurvePoint(16, 2.0))
    )
    plan = StepPlan(rows=[0], starts=[0], counts=[num_tokens])
    assert CostModel(OPT_13B, machine, dtype="bfloat16").step_s(plan) == pytest.approx(expected * LAYER_WEIGHTS)
    in_float32 = CostModel(OPT_13B, machine, dtype="float32").step_s(plan)
    assert in_float32 == pytest.approx(2 * expected * LAYER_WEIGHTS), "twice the bytes"
