"""Beam searches for benchmarks: requests, an engine with random scores, and one over a real model.

What beams share depends on when they part, and that on the model: where it is sure of the next token, every beam stays
separate for long; where several tokens are as good as each other, the best beam's children soon displace the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import numpy as np

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.deltas import TokenLogprobs
from quire.core.plan import StepPlan, StepResult
from quire.core.pooling import BeamTask
from quire.core.sampling_params import as_sampling_params
from quire.core.sequence import Request
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from without_model import request_of

VOCAB_SIZE = 256  # random scores: enough for long tails


class Lengths(NamedTuple):
    """Tokens of a request: of its prompt, and of each answer."""

    prompt: int
    output: int


def beam_request(request_id: int, prompt: list[int], output_len: int, width: int) -> Request:
    """Return a search of exactly that length: end-of-sequence is not looked for."""
    beam = BeamSearchParams(width, output_len, ignore_eos=True)
    request = request_of(request_id, prompt, output_len, width)
    return replace(request, params=as_sampling_params(beam), task=BeamTask(beam))


def random_scores(width: int, spread: float, seed: int) -> Callable[[StepPlan], StepResult]:
    """Return what answers every sample with the `width` likeliest of VOCAB_SIZE tokens, at random.

    A beam's next-token logits are independent normal draws with standard deviation `spread`, in every step anew. The
    larger the spread, the surer the model: the likeliest token has 4 % on average at 1, 19 at 2, 51 at 4, 75 at 8.
    """
    generator = np.random.default_rng((seed, width))

    def answer(plan: StepPlan) -> StepResult:
        logits = generator.normal(0.0, spread, (len(plan.sample_rows), VOCAB_SIZE))
        best = np.argsort(logits, axis=-1)[:, : -width - 1 : -1]
        logprobs = np.take_along_axis(logits, best, axis=-1) - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        ranks, answers = [1, *range(1, width + 1)], list[TokenLogprobs | None]()
        for ids, row in zip(best.tolist(), logprobs.tolist(), strict=True):
            answers.append(TokenLogprobs([ids[0], *ids], [row[0], *row], ranks))
        return StepResult(best[:, 0].tolist(), answers)

    return answer


def model_engine(model: str | None, max_num_seqs: int, seed: int) -> Engine:
    """Return an engine over a model, without prefix caching."""
    options = EngineOptions(
        model=model, max_num_seqs=max_num_seqs, kv_cache_memory="1GiB", enable_prefix_caching=False, seed=seed
    )
    return assemble(options, loads_tokenizer=False).engine


def written_prompts(llm: LLM, requests: Sequence[Lengths], seed: int) -> list[list[int]]:
    """Return a prompt of each request's length that the model has written itself, at temperature 1."""
    params = [
        SamplingParams(max_tokens=lengths.prompt, seed=seed + number, ignore_eos=True, detokenize=False)
        for number, lengths in enumerate(requests)
    ]
    outputs = llm.generate(list(repeat([0], len(requests))), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
