"""Prompts with images for an engine in the process, past the reading of files and texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.requests.input_processor import TokenizedPrompt
from support.answers import Answer, answers_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
RANDOM = replace(GREEDY, temperature=0.9, seed=5, repetition_penalty=1.3)


def text(seed: int, count: int) -> list[int]:
    """Return random ids of tokens that are no image's."""
    return torch.randint(5, 150, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(
    llm: LLM, prompts: Sequence[TokenizedPrompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    """Return the outputs, in order; the scheduler's invariants hold behind them."""
    found = llm._finish_all(llm._prepare(list(prompts), params), use_tqdm=False)
    llm._engine.engine.scheduler.check()
    return found


def answers(llm: LLM, prompts: Sequence[TokenizedPrompt], params: Any = GREEDY) -> list[list[Answer]]:  # noqa: ANN401
    """Return the answers of the outputs of `generate`."""
    return [answers_of(each) for each in generate(llm, prompts, params)]


def open_llm(folder: Path, **settings: Any) -> LLM:  # noqa: ANN401 (any setting)
    """Return an engine with few blocks, for prompts of ids."""
    sizes = {"num_kv_blocks": 48, "max_num_seqs": 8, "block_size": 8}
    return LLM(folder, skip_tokenizer_init=True, **{**sizes, **settings})
