"""The decoder's promises: neighbours, chunks and block sizes change nothing; a slot of -1 writes nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.core.arrays import dtype_name
from quire.kernels.back_end import BackEnd
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model
from support.on_tensors import arrays, run, tensors

STORIES = Path(__file__).parents[2] / "../shared/data/models/stories260K"
DTYPES = ["float32", "bfloat16", "float16"]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_do_not_change_a_bit(
    dtype: str, write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_llama(), dtype=dtype, back_end=back_end)
    prompts = {name: tokens_of(seed, count) for seed, (name, count) in enumerate([("a", 1), ("b", 37), ("c", 90)])}
    alone = {name: paged_runner(decoder).step({name: tokens})[name] for name, tokens in prompts.items()}
    together = paged_runner(decoder).step(prompts)
    for name in prompts:
        assert torch.equal(alone[name], together[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [[], [3, 30], [16, 16], [40]], ids=["singles", "3, 30", "16, 16", "40"])
def test_chunks_do_not_change_a_bit(
    dtype: str, chunks: list[int], write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_llama(), dtype=dtype, back_end=back_end)
    tokens = tokens_of(5, 41)
    whole = paged_runner(decoder).step({"a": tokens})["a"]
    assert torch.equal(paged_runner(decoder).run("a", tokens, chunks), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes_do_not_change_a_bit(
    dtype: str, block_size: int, write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_llama(), dtype=dtype, back_end=back_end)
    tokens = tokens_of(6, 45)
    expected = paged_runner(decoder, block_size=8).run("a", tokens, [40])
    assert torch.equal(paged_runner(decoder, block_size=block_size).run("a", tokens, [40]), expected)


def test_slot_of_minus_one_reads_the_cache_and_leaves_it(
    write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_llama(), back_end=back_end)
    runner, tokens = paged_runner(decoder), tokens_of(7, 16)
    expected = runner.step({"a": tokens})["a"][-1:]
    before = [tensor.clone() for tensor in tensors([*runner.cache.keys, *runner.cache.values])]
    table = torch.tensor([runner.table("a")], dtype=torch.int32)
    last = ForwardBatch(
        token_ids=torch.tensor(tokens[-1:]),
        positions=torch.tensor([15]),
        slot_mapping=torch.tensor([-1]),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([16], dtype=torch.int32),
        block_tables=table,
    )
    assert torch.equal(run(decoder, last, runner.cache), expected)
    after = tensors([*runner.cache.keys, *runner.cache.values])
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_float32(dtype: str, write_llama: Callable[..., Path], back_end: BackEnd) -> None:
    decoder = load_model(write_llama(), dtype=dtype, back_end=back_end)
    hidden = np.zeros((3, 32), np.float32)
    states = torch.from_numpy(hidden).to(getattr(torch, dtype))
    logits = decoder.logits(states if decoder.back_end.name == "torch" else arrays(states))
    assert dtype_name(logits.dtype) == "float32"
    assert logits.shape == (3, 96)


@pytest.mark.parametrize("dtype", DTYPES)
def test_progress_counts_layers_and_heads(
    dtype: str, write_llama: Callable[..., Path], back_end: BackEnd, paged_runner: Callable
) -> None:
    decoder = load_model(write_llama(), dtype=dtype, back_end=back_end)
    paged_runner(decoder).step({"a": tokens_of(3, 9)})
    assert decoder.progress.tolist() == [decoder.spec.num_layers + 1]


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/data/models/stories260K")
def test_stories_continue_token_for_token(back_end: BackEnd, paged_runner: Callable) -> None:
    decoder = load_model(STORIES, back_end=back_end)
    cases = json.loads((STORIES / "expected.json").read_text())["cases"]
    runner = paged_runner(decoder, block_size=16, num_blocks=400)
    answers: dict[str, list[int]] = {case["prompt"]: [] for case in cases}
    expected = {case["prompt"]: case["output_token_ids"] for case in cases}
    pieces = {case["prompt"]: case["prompt_token_ids"] for case in cases}
    while pieces:  # all of them as one batch, each leaving when it has its length
        logits = runner.step(pieces)
        for name in pieces:
            answers[name].append(int(logits[name][-1].argmax()))
        pieces = {name: answers[name][-1:] for name in pieces if len(answers[name]) < len(expected[name])}
    assert answers == expected

