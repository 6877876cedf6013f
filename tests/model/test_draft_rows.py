"""Steps that verify drafts compute each row with the bits of a step of one token, whatever the drafts were.

The ground under `quire.execution.row_results`, on every instruction set and for every dtype of weights and KV cache:
logits behind kept drafts are those of single steps, and so are keys and values once rejected drafts are overwritten.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.extension.isas import usable_isas
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.reference.kv_cache import as_bytes
from quire.model.decoder import Decoder
from quire.model.loader import load_model
from quire.model.quantization import Activations, Method, QuantizationOptions, resolve
from support.on_tensors import tensors
from support.paged_runner import PagedRunner
from support.pairwise import covering
from support.random_model import VOCAB_SIZE, write_random_model

BACK_ENDS = [("torch", "auto"), *(("cpp", isa) for isa in usable_isas())]
WEIGHTS: dict[str, tuple[Method | None, Activations | None]] = {
    "dense": (None, None), "int8": ("int8", None), "int4": ("int4", None), "expanded": ("int4", "bfloat16"),
}  # fmt: skip
KV_DTYPES = ("auto", "int8_per_token_head", "fp8_per_token_head", "fp8")
PROMPT_LEN, LENGTH = 236, 296  # verified rows stand on both sides of a border between partitions of 256 tokens
NUMS_DRAFTS = (1, 2, 4, 8, 16, 32)


@pytest.fixture(scope="module", params=BACK_ENDS, ids="-".join)
def each_back_end(request: pytest.FixtureRequest) -> Iterator[BackEnd]:
    name, isa = request.param
    yield choose_back_end(torch.device("cpu"), name, isa)
    choose_back_end(torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def contents(runner: PagedRunner, name: str) -> list[Tensor]:
    """Return the keys and values of a sequence that fills its blocks."""
    blocks = runner.table(name)[: LENGTH // runner.cache.block_size]
    return [as_bytes(tensor)[blocks] for tensor in tensors(runner.cache.tensors)]


def single_steps(decoder: Decoder, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the logits behind each token from the prompt's last one on, and keys and values."""
    runner = PagedRunner(decoder)
    logits = runner.run("a", tokens, [PROMPT_LEN])
    return logits[PROMPT_LEN:], contents(runner, "a")


def verified_steps(decoder: Decoder, tokens: list[int], num_drafts: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return the same by steps that verify drafts with any number of right tokens; every other step has more rows."""
    rng, runner = random.Random(seed), PagedRunner(decoder, num_blocks=200)
    runner.step({"b": tokens_of(1, 250), "a": tokens[:PROMPT_LEN], "c": tokens_of(2, 31)})
    done, kept, has_company = PROMPT_LEN, list[Tensor](), False
    while done < LENGTH:
        num_right = rng.randint(0, min(num_drafts, LENGTH - done - 1))
        right = tokens[done : done + 1 + num_right]
        wrong = [(tokens[done + 1 + num_right] + 1) % VOCAB_SIZE] if done + 1 + num_right < LENGTH else [0]
        entry = (right + wrong + tokens_of(done, num_drafts))[: 1 + num_drafts]
        before = {"b": tokens_of(done, 1), "d": tokens_of(done, 3)} if has_company else {}
        after = {"c": tokens_of(done, 1 + num_drafts)} if has_company else {}
        kept.append(runner.step(before | {"a": entry} | after)["a"][: 1 + num_right])
        done += 1 + num_right
        runner.truncate("a", done)
        has_company = not has_company
    return torch.cat(kept), contents(runner, "a")


def check(decoder: Decoder, nums_drafts: tuple[int, ...]) -> None:
    tokens = tokens_of(0, LENGTH)
    logits, stored = single_steps(decoder, tokens)
    for num_drafts in nums_drafts:
        found, written = verified_steps(decoder, tokens, num_drafts, seed=num_drafts)
        assert torch.equal(found, logits), f"{num_drafts} drafts"
        assert all(map(torch.equal, written, stored)), f"{num_drafts} drafts"


@covering(
    {"each_back_end": BACK_ENDS, "dtype": ["float32", "bfloat16"], "weights": [*WEIGHTS]}, indirect=["each_back_end"]
)
def test_rows_with_drafts_have_the_bits_of_single_steps(
    folder: Path, each_back_end: BackEnd, dtype: str, weights: str
) -> None:
    method, activations = WEIGHTS[weights]
    quantization = resolve(QuantizationOptions(method, activations=activations), "config.json")
    check(load_model(folder, dtype=dtype, back_end=each_back_end, quantization=quantization), NUMS_DRAFTS)


@covering(
    {"each_back_end": BACK_ENDS, "dtype": ["float32", "bfloat16"], "kv_dtype": KV_DTYPES[1:]},
    indirect=["each_back_end"],
)
def test_rows_with_drafts_have_the_bits_of_single_steps_over_a_cache_of_8_bits(
    folder: Path, each_back_end: BackEnd, dtype: str, kv_dtype: str
) -> None:
    check(load_model(folder, dtype=dtype, back_end=each_back_end, kv_cache_dtype=kv_dtype), (1, 4, 16))


def test_rejected_draft_in_the_context_changes_logits_and_keys(folder: Path) -> None:
    """The comparisons above can fail: a rejected draft that stays in the context changes the bits."""
    decoder, tokens = load_model(folder, back_end=choose_back_end(torch.device("cpu"))), tokens_of(0, LENGTH)
    logits, stored = single_steps(decoder, tokens)
    tokens[PROMPT_LEN + 7] += 1
    changed, written = single_steps(decoder, tokens)
    assert torch.equal(logits[:7], changed[:7])
    assert not any(torch.equal(a, b) for a, b in zip(logits[7:], changed[7:], strict=True))
    assert not any(map(torch.equal, written, stored))
