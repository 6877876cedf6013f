"""The bar of the offline API moves by tokens, and is drawn for those that see it alone."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.engine_metrics import NumTokens
from quire.progress import TokenProgress

PARAMS = SamplingParams(max_tokens=8, n=2, ignore_eos=True, temperature=0.0)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Cell(io.StringIO):
    """A notebook's stream: no terminal, known by the module of its class."""


Cell.__module__ = "ipykernel.iostream"


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_bar_moves_by_tokens_before_any_request_has_ended(llm: LLM) -> None:
    counts = NumTokens(100, 1000)
    requests = llm._prepare(llm._tokenize(PROMPTS), PARAMS)
    bar = TokenProgress(requests, lambda: counts)
    assert bar.share == 0
    counts = NumTokens(108, 1000)
    assert bar.share == 8 / 40
    counts = NumTokens(108, 1016)
    assert bar.share == 24 / 40
    bar._started_s = 10.0
    assert bar.rates(12.0) == "in 4, out 8 tokens/s"


def test_request_that_ends_early_is_done(llm: LLM) -> None:
    short = SamplingParams(max_tokens=40, stop_token_ids=[*range(llm.vocab_size)], temperature=0.0)
    requests = llm._prepare(llm._tokenize(PROMPTS), short)
    bar = TokenProgress(requests, llm._metrics.num_tokens)
    for output in llm._run(requests, "final"):
        bar.ended(output)
    assert bar.share == 1


@pytest.mark.parametrize(("stream", "is_drawn"), [(Terminal, True), (Cell, True), (io.StringIO, False)])
def test_bar_is_drawn_where_it_is_seen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], is_drawn: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", shown := stream())
    llm.generate(PROMPTS, PARAMS)
    assert ("2/2" in shown.getvalue() and "tokens/s" in shown.getvalue()) == is_drawn
    shown.seek(0)
    shown.truncate()
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert shown.getvalue() == ""
