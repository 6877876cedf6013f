"""Which beams survive: the parents of a beam search's next beams, step by step, from a random process or from a model.

What beams share depends on when they part, and that on the model: where it is sure of the next token, every beam goes
its own way for long; where several tokens are as good as each other, the best beam's children soon displace the others.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from quire import LLM, SamplingParams

VOCAB_SIZE = 256  # of the random process: enough for 2 x 6 candidates, and for long tails


class Lengths(NamedTuple):
    """Tokens of a request: of its prompt, and of each answer."""

    prompt: int
    output: int


Parents = list[int]  # of the next beams, best first; beams are numbered 0 to width - 1


def random_patterns(requests: Sequence[Lengths], width: int, spread: float, seed: int) -> Iterator[Iterator[Parents]]:
    """Yield each request's parents, one list per output token after the first, from random scores.

    Every beam's next-token logits are VOCAB_SIZE independent normal draws with standard deviation `spread`, in every
    step anew; a beam's score is the sum of its log-probabilities, and the `width` best of all candidates survive. The
    larger the spread, the surer the model: the likeliest token has 4 % on average at 1, 19 at 2, 51 at 4, 75 at 8.
    """
    generator = np.random.default_rng((seed, width))
    for lengths in requests:
        yield _random_parents(generator, width, spread, lengths.output - 1)


def _random_parents(generator: np.random.Generator, width: int, spread: float, num_steps: int) -> Iterator[Parents]:
    scores = np.sort(_log_softmax(generator.normal(0.0, spread, (1, VOCAB_SIZE)))[0])[-width:][::-1]
    for _ in range(num_steps):
        candidates = scores[:, None] + _log_softmax(generator.normal(0.0, spread, (width, VOCAB_SIZE)))
        chosen = np.argsort(candidates, axis=None)[-width:][::-1]
        scores = candidates.flat[chosen]
        yield (chosen // VOCAB_SIZE).tolist()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def model_patterns(llm: LLM, requests: Sequence[Lengths], width: int, seed: int) -> Iterator[Iterator[Parents]]:
    """Yield each request's parents as a beam search over a model has them; end-of-sequence is not looked for.

    All requests go on together. A step asks the model for the 2 x width likeliest tokens behind every beam, by requests
    for one token: the prefix cache makes that cheap. Prompts are what the model itself writes at temperature 1.
    """
    prompts = written_prompts(llm, requests, seed)
    beams = [[(0.0, prompt)] for prompt in prompts]
    parents: list[list[Parents]] = [[] for _ in requests]
    for step in range(max(lengths.output for lengths in requests)):
        going = [number for number, lengths in enumerate(requests) if step < lengths.output]
        candidates = iter(_likeliest(llm, [tokens for number in going for _, tokens in beams[number]], 2 * width))
        for number in going:
            chosen = _best(beams[number], list(islice(candidates, len(beams[number]))), width)
            if step > 0:
                parents[number].append([parent for _, parent, _ in chosen])
            beams[number] = [(score, [*beams[number][parent][1], token]) for score, parent, token in chosen]
    return (iter(each) for each in parents)


def written_prompts(llm: LLM, requests: Sequence[Lengths], seed: int) -> list[list[int]]:
    """Return a prompt of each request's length that the model has written itself."""
    params = [
        SamplingParams(max_tokens=lengths.prompt, seed=seed + number, ignore_eos=True, detokenize=False)
        for number, lengths in enumerate(requests)
    ]
    outputs = llm.generate(list(repeat([0], len(requests))), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _likeliest(llm: LLM, sequences: list[list[int]], count: int) -> list[list[tuple[int, float]]]:
    """Return (token, log-probability) of the likeliest tokens behind each sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate(sequences, params, use_tqdm=False)
    found = [output.outputs[0].logprobs or [] for output in outputs]
    return [[(token, entry.logprob) for token, entry in steps[0].items()] for steps in found]


def _best(
    beams: list[tuple[float, list[int]]], candidates: list[list[tuple[int, float]]], width: int
) -> list[tuple[float, int, int]]:
    """Return the `width` best of all beams' candidates: score, parent, token."""
    scored = [
        (score + logprob, parent, token)
        for parent, ((score, _), tokens) in enumerate(zip(beams, candidates, strict=True))
        for token, logprob in tokens
    ]
    return sorted(scored, reverse=True)[:width]
