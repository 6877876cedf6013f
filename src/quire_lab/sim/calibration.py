"""Fit of a `Hardware` to the times of a few kinds of steps (`quire bench calibrate`), to predict other steps.

A step's time is taken as layers x c(tokens) + head x c(samples) + attention + s x sequences, with layers and head in
weights (see `hardware.py`). Many decodes and a prefill of as many tokens separate s from c; one long prompt and several
short ones give the arithmetic of attention; decodes behind long and short contexts the speed of reading the KV cache.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire.model.config import num_layer_weights
from quire.model.spec import DecoderSpec
from quire_lab.sim.footprint import CPU_PACKING, stored_kv_bytes_per_token
from quire_lab.sim.hardware import CurvePoint, Hardware

DECODES = (1, 2, 4, 8, 16, 32, 64)          # sequences of a step, one token each
PREFILLS = (64, 128, 256, 512, 1024, 2048)  # tokens of a prompt
NUM_PARTS = 8                               # prompts that a long one is cut into; sequences behind long contexts
SHORT_CONTEXT = 16
NUM_ITERATIONS = 4
LEAST = 1e-3                                # share that a part of a step, or a small step, has at least: noise hides it


class StepSize(NamedTuple):
    """A prefill of `num_seqs` prompts of `num_tokens`, or a decode of one more token behind each."""

    num_seqs: int
    num_tokens: int
    is_decode: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'decode behind' if self.is_decode else 'prefill of'} {self.num_seqs} x {self.num_tokens} tokens"


def step_sizes(longest: int) -> list[StepSize]:
    """Return the steps to be timed, where steps and sequences have at most `longest` tokens.

    Last of all a decode behind long contexts, and as many tokens as the longest prefill has, in several prompts.
    Raises ConfigError if too few fit.
    """
    prefills = [StepSize(1, num, is_decode=False) for num in PREFILLS if num <= longest]
    if len(prefills) < 3:
        raise ConfigError(f"steps of {PREFILLS[2]} tokens are needed, model and max_num_batched_tokens give {longest}")
    longest = prefills[-1].num_tokens
    decodes = [StepSize(num, SHORT_CONTEXT, is_decode=True) for num in DECODES]
    long_decode = StepSize(NUM_PARTS, longest // 2, is_decode=True)
    return [*decodes, *prefills, long_decode, StepSize(NUM_PARTS, longest // NUM_PARTS, is_decode=False)]


def fit_hardware(
    name: str,
    spec: DecoderSpec,
    dtype: str,
    step_s: Mapping[StepSize, float],
    memory_bytes: int,
    kv_cache_dtype: str = "auto",
) -> Hardware:
    """Return the machine on which the `step_sizes` take these times, with this model in `dtype`."""
    num_layers, num_head = num_layer_weights(spec), spec.vocab_size * spec.embedding_size
    num_weights = num_layers + num_head
    kv_dtype = CPU_PACKING.kernel_dtype(dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
    kv_bytes = stored_kv_bytes_per_token(spec, kv_dtype)
    least_s = LEAST * max(step_s.values())  # a decode is the difference of two times: noise may leave less than none
    step_s = {size: max(seconds, least_s) for size, seconds in step_s.items()}
    *_, long_decode, in_parts = step_s
    decodes = {size.num_seqs: seconds for size, seconds in step_s.items() if size.num_tokens == SHORT_CONTEXT}
    read_s = max(step_s[long_decode] - decodes[NUM_PARTS], LEAST * decodes[NUM_PARTS])
    read_s /= NUM_PARTS * (long_decode.num_tokens - SHORT_CONTEXT)  # for each token of a context
    decodes = {num: seconds - num * (SHORT_CONTEXT + 1) * read_s for num, seconds in decodes.items()}
    alone = {size: seconds for size, seconds in step_s.items() if size.num_seqs == 1}
    prefills = {size.num_tokens: seconds for size, seconds in alone.items() if not size.is_decode}
    many, long = max(decodes), max(prefills)

    as_one = (num_layers * decodes[many] + num_head * decodes[1]) / num_weights  # a prefill of as many tokens, and more
    more_sequences = (many * num_layers + num_head) / num_weights - 1
    more_attended = _num_attended(long) - NUM_PARTS * _num_attended(in_parts.num_tokens)
    attended_s, points = 0.0, dict[int, float]()
    for _ in range(NUM_ITERATIONS):  # the time of attention depends on that of sequences, and the other way round
        many_s = prefills[many] - _num_attended(many) * attended_s
        sequence_s = max(0.0, (as_one - many_s) / more_sequences)
        points = {num: (seconds - num * sequence_s) / num_weights for num, seconds in decodes.items()}
        parts_s = step_s[in_parts] - (NUM_PARTS - 1) * sequence_s - num_head * (points[NUM_PARTS] - points[1])
        attended_s = max(prefills[long] - parts_s, LEAST * prefills[long]) / more_attended

    around_s = sequence_s + num_head * points[1]
    points |= {
        num: (seconds - around_s - _num_attended(num) * attended_s) / num_layers
        for num, seconds in prefills.items()
        if num > many
    }
    ascending = (points[num] for num in sorted(points))
    _, *slowest = accumulate(ascending, max, initial=LEAST * max(points.values()))  # more tokens never take less
    return Hardware(
        name,
        memory_bytes,
        bytes_per_s=kv_bytes / read_s,
        flops_per_s=spec.attended_flops / attended_s,
        bandwidth_share=1.0,
        flops_share=1.0,
        step_s=0.0,
        sequence_s=sequence_s,
        device="cpu",
        dtype=dtype,
        curve=tuple(map(CurvePoint, sorted(points), slowest)),
    )


def _num_attended(num_tokens: int) -> float:
    """Return the pairs of a query and a token that it sees, in a prompt computed at once."""
    return num_tokens * (num_tokens + 1) / 2
