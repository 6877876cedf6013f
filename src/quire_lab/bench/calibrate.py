"""Timed steps of a real engine, from which `quire bench calibrate` fits a `Hardware`."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.core.sampling_params import SamplingParams
from quire_lab.sim.calibration import StepSize

if TYPE_CHECKING:
    from quire.llm import LLM

Clock = Callable[[], float]
_DECODE_STEPS = 12  # that one measurement is over


def time_steps(
    llm: "LLM", sizes: list[StepSize], rounds: int, seed: int, clock: Clock = time.perf_counter
) -> dict[StepSize, list[float]]:
    """Return the seconds of a step of every size, once for each round.

    A round goes over all sizes, so that a drift of the machine's speed affects all of them.
    """
    generator = np.random.default_rng(seed)
    times: dict[StepSize, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size, seconds in times.items():
            prompts = generator.integers(llm.vocab_size, size=(size.num_seqs, size.num_tokens)).tolist()
            seconds.append((_decode_s if size.is_decode else _prefill_s)(llm, prompts, clock))
    return times


def _decode_s(llm: "LLM", prompts: list[list[int]], clock: Clock) -> float:
    """Return the mean seconds of a decode step behind the prompts."""
    _prefill_s(llm, prompts, clock)  # from now on the prefix cache has them, if there is one: both times alike in that
    prompt_s = _prefill_s(llm, prompts, clock)
    return (_prefill_s(llm, prompts, clock, 1 + _DECODE_STEPS) - prompt_s) / _DECODE_STEPS


def _prefill_s(llm: "LLM", prompts: list[list[int]], clock: Clock, output_len: int = 1) -> float:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    started_s = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return clock() - started_s
