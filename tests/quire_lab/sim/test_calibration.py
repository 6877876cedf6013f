"""A machine fitted to the times of a known one predicts what that one takes."""

import random

import pytest

from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.model.spec import DecoderSpec
from quire_lab.sim.calibration import StepSize, fit_hardware, step_sizes
from quire_lab.sim.hardware import CONTIGUOUS_ATTENTION_FACTOR, CostModel, CurvePoint, Hardware
from quire_lab.sim.models import read_model

SPEC = read_model("OPT-13B").spec
KNOWN = Hardware(
    "known", 1e12, bytes_per_s=1e11, flops_per_s=2e11, bandwidth_share=1, flops_share=1, step_s=0.0, sequence_s=2e-3,
    device="cpu", dtype="bfloat16",
    curve=tuple(CurvePoint(num, 1e-10 + 2e-12 * num) for num in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
)  # fmt: skip


def plan_of(size: StepSize) -> StepPlan:
    rows = list(range(size.num_seqs))
    starts, counts = (size.num_tokens, 1) if size.is_decode else (0, size.num_tokens)
    return StepPlan(rows=rows, starts=[starts] * len(rows), counts=[counts] * len(rows), sample_rows=rows)


def cost_on(hardware: Hardware, spec: DecoderSpec = SPEC) -> CostModel:
    return CostModel(spec, hardware, dtype="bfloat16", attention_factor=CONTIGUOUS_ATTENTION_FACTOR)


@pytest.fixture(scope="module")
def fitted() -> Hardware:
    sizes, known = step_sizes(2047), cost_on(KNOWN)
    times = {size: known.step_s(plan_of(size)) for size in sizes}
    return fit_hardware("fitted", SPEC, "bfloat16", times, int(1e12))


def test_parts_of_a_step_are_told_apart(fitted: Hardware) -> None:
    assert fitted.sequence_s == pytest.approx(2e-3, rel=0.05)
    assert fitted.bytes_per_s == pytest.approx(1e11, rel=0.02)
    assert fitted.flops_per_s == pytest.approx(2e11, rel=0.05)


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "is_decode"),
    [(3, 700, True), (24, 100, True), (50, 900, True), (1, 700, False), (5, 60, False)],
)
def test_other_steps_are_predicted(fitted: Hardware, num_seqs: int, num_tokens: int, is_decode: bool) -> None:
    size = StepSize(num_seqs, num_tokens, is_decode)
    assert cost_on(fitted).step_s(plan_of(size)) == pytest.approx(cost_on(KNOWN).step_s(plan_of(size)), rel=0.02)


def test_noise_that_hides_a_part_leaves_a_machine() -> None:
    sizes = step_sizes(512)
    hardware = fit_hardware("noisy", SPEC, "bfloat16", dict.fromkeys(sizes, 0.1), int(1e12))
    assert hardware.sequence_s >= 0
    assert cost_on(hardware).step_s(plan_of(StepSize(8, 100, True))) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("seed", range(50))
def test_noise_beyond_all_measure_leaves_a_machine(seed: int) -> None:
    """A step that others held up takes any time; a decode, as the difference of two that they did, less than none."""
    sizes, known, rng = step_sizes(512), cost_on(KNOWN), random.Random(seed)
    times = {size: known.step_s(plan_of(size)) * rng.lognormvariate(0, 2) for size in sizes}
    for size in rng.sample([size for size in sizes if size.is_decode], seed % 4):
        times[size] *= -1
    hardware = fit_hardware("noisy", SPEC, "bfloat16", times, int(1e12))
    assert cost_on(hardware).step_s(plan_of(StepSize(8, 100, True))) > 0


def test_cache_is_kept_in_the_kernels_dtype() -> None:
    """A CPU keeps the keys and values of a float16 model as float32: twice the bytes in the same time."""
    sizes, known = step_sizes(512), cost_on(KNOWN)
    times = {size: known.step_s(plan_of(size)) for size in sizes}
    half, brain = (fit_hardware("cpu", SPEC, dtype, times, int(1e12)) for dtype in ("float16", "bfloat16"))
    assert half.bytes_per_s == pytest.approx(2 * brain.bytes_per_s)


def test_steps_must_be_long_enough() -> None:
    with pytest.raises(ConfigError, match="steps of 256 tokens are needed, model and max_num_batched_tokens give 200"):
        step_sizes(200)
