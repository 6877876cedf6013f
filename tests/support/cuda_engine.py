"""What every device has to get right: the same tokens alone and in company, preempted, swapped, found and forked."""

from collections.abc import Callable
from pathlib import Path

import torch

from quire import LLM, SamplingParams

PROMPTS = [[(7 * i * i + 3 * seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)  # 14 blocks do not hold all of them at once


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    """Return the tokens of every branch of every prompt."""
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [[list(branch.token_ids) for branch in output.outputs] for output in outputs]


def differences_beyond_margin(model: Path, prompt: list[int], tokens: list[int], margin: float) -> list[int]:
    """Return where `tokens` are not the likeliest, and no near-tie either, after what stands before them on the CPU."""
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
    with LLM(model, device="cpu", dtype="float32", num_kv_blocks=32) as llm:
        (output,) = llm.generate([prompt + tokens], score, use_tqdm=False)
    assert output.prompt_logprobs is not None
    beyond = []
    for index, token in enumerate(tokens):
        entries = output.prompt_logprobs[len(prompt) + index]
        assert entries is not None
        if max(each.logprob for each in entries.values()) - entries[token].logprob > margin:
            beyond.append(index)
    return beyond


def check_sharing(make: Callable[..., LLM], model: Path, margin: float) -> None:
    """Assert the margin rule for every answer, and that each way of sharing and preempting took place."""
    held_before = memory_in_use()
    settings = {"model": model, "dtype": "float32", "max_num_batched_tokens": 24, "block_size": 8}
    with make(**settings, num_kv_blocks=64) as llm:
        answers = [tokens_of(llm, PROMPTS)]
        answers.append(tokens_of(llm, PROMPTS))  # prefix hits
        assert llm.kv_stats().prefix_hits_tokens > 0
        (forked,) = tokens_of(llm, PROMPTS[:1], SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=6))
        assert len({tuple(branch) for branch in forked}) > 1
    for mode in ("recompute", "swap"):
        with make(**settings, num_kv_blocks=14, num_swap_blocks=24, preemption_mode=mode) as llm:
            answers.append(tokens_of(llm, PROMPTS, LONG))
            assert llm.kv_stats().preemptions[mode] > 0
    for answer in answers:
        for prompt, (tokens,) in zip(PROMPTS, answer, strict=True):
            assert not differences_beyond_margin(model, prompt, tokens, margin)
    assert memory_in_use() <= held_before, "close() has kept something"


def memory_in_use() -> int:
    """Return the bytes of the GPU that this process's tensors take, without cuBLAS's workspaces."""
    if not torch.cuda.is_available():
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # the process's, not the engine's
    return torch.cuda.memory_allocated()
