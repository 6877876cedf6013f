"""Prompts that ranks of tensor parallelism answer in tests, and the bits of their answers."""

from quire import RequestOutput, SamplingParams

PROMPTS = [[5, 9, 11, 200, 31] * 9, [7] * 40, [5, 9, 11, 200, 31] * 9 + [4, 4]]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True, n=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def answers(outputs: list[RequestOutput]) -> list[object]:
    """Return tokens and logprobs of prompts and answers."""
    return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in outputs]
